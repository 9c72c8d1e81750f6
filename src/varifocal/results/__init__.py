"""Every file that is written: a frozen record with its name, its reader and its writer. Imports no other room."""
