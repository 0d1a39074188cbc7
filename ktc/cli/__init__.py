"""The command line. `app` has the table of commands; each other module has a command or a group of them."""
