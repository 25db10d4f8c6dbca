"""`decide`: what to do next, from the run table, the devices and the cost model. Pure; never replayed."""
