"""The command line `hexrt`, and the loading of the configuration."""
