"""The production store: PostgreSQL 15 or newer, through asyncpg."""
