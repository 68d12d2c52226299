"""Pages of one HTML file: assembly, style, tables and charts, pictures of rows."""
