"""Running handlers: claiming work, keeping its leases, reporting what became of it."""
