"""The one error a user of the example can cause."""


class UserError(Exception):
    """Something only the user can mend: one line that says what to do; exit code 2."""
