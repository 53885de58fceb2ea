"""The contract that training promises and the service keeps: templates, token ids, bundles. No torch, no HTTP."""
