"""The command line. `app` holds the commands' options; each other module is what a command or a group of them says."""
