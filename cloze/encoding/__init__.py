"""The contract between training and the service: templates, token ids and bundles. Independent of both."""
