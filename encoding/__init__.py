"""The contract between training and the service: templates, token ids and bundles. Imports neither torch nor FastAPI."""
