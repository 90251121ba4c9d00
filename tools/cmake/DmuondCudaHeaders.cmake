# The CUDA toolkit's headers, which are all that the fake driver and what runs on it need. CUDA_HOME
# says where they are, else /usr/local/cuda. Without them these tests are left out, and continuous integration
# (CI in the environment) fails.
include_guard(GLOBAL)

find_path(DMUOND_CUDA_INCLUDE cuda_runtime.h HINTS ENV CUDA_HOME PATH_SUFFIXES include PATHS /usr/local/cuda
  DOC "Folder of cuda.h and cuda_runtime.h")
if(DMUOND_CUDA_INCLUDE)
  add_library(dmuond_cuda_headers INTERFACE)
  target_include_directories(dmuond_cuda_headers SYSTEM INTERFACE ${DMUOND_CUDA_INCLUDE})
elseif(DEFINED ENV{CI})
  message(FATAL_ERROR "The CUDA toolkit's headers are neither in CUDA_HOME/include nor in /usr/local/cuda/include; "
    "without them no test would run the CUDA device")
else()
  message(STATUS "No CUDA headers (CUDA_HOME, /usr/local/cuda): the tests on a fake CUDA driver are left out")
endif()
