"""The interfaces of the servers: what each is asked for, and what its answers say of laws."""
