"""The command line. One subcommand is one module here; ``app.COMMANDS`` lists them."""
