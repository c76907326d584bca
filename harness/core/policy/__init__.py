"""Pure decisions: every "should we", as a function of values, so that a table in a test can cover it."""
