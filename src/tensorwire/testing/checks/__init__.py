"""The checks that every transport must pass, by subject; see `tensorwire.testing.conformance`.

A check is a public function of one `CheckSetup`. It fails by an assertion or any other exception.
"""
