"""One file a wire format."""
