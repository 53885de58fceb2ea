"""Parts that training methods are built from: generators, discriminators, dropout, text edits, gathering."""
