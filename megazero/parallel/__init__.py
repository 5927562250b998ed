"""Who is who: degrees, coordinates and ranks; which slice of which parameter sits where.  Pure: no process group."""
