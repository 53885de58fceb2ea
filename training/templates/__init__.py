"""Search for the template that suits an encoder best."""
