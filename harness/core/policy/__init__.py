"""Pure decisions: every "should we", as functions of values, so that each of them is a table in a test."""
