"""What a training or a serving takes, before it is paid for."""
