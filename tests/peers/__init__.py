"""The peers of `hexrt bench overhead`; Ray and Dask are tried where they are installed."""
