"""What flows: samples and groups, the sample store, and the wire format between the roles."""
