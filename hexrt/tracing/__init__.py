"""Where the time went: `layout` turns timelines into tracks and slices (pure), `perfetto` writes those as a Perfetto trace."""
