"""mhfast in other libraries, in modules that must be imported explicitly."""
