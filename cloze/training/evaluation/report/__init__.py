"""What is written of figures: a report, and the figures on a model card."""
