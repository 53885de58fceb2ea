"""The service over HTTP: middleware, routes, and their request and response bodies."""
