// What targets of precompiled headers are made from: see dmuond_headers() in Dmuond.cmake.
