"""What the service answers over HTTP: a file for each who asks."""
