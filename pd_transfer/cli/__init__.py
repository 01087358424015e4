"""``pdt``, the operator's command line. One module per subcommand; ``main`` knows them."""
