"""What a model's heads read and what its gates decide, token by token, summed up with intervals over documents."""
