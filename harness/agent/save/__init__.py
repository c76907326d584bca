"""From a sealed slot to a committed snapshot in each tier."""
