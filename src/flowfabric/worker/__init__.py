"""Running handlers: claiming work, keeping its leases, reporting how it ended."""
