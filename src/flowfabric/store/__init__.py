"""Where rows live. `base` is the protocol, `urls.open_store` picks a database."""
