"""The service over HTTP: middleware, routes and what they take and give."""
