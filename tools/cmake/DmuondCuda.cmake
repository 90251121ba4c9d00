# The CUDA language for Hopper, with DMUOND_CUDA=ON. Needs nvcc and no GPU. Included by the root:
# a language is enabled in the highest folder that uses it.
include_guard(GLOBAL)

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND EXISTS /usr/local/cuda/bin/nvcc)
  set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
endif()
# CMake before 3.26 knows neither nvcc's C++20 nor sm_90a: told here, and as a flag below.
set(CMAKE_CUDA_ARCHITECTURES OFF)
set(CMAKE_CUDA_STANDARD 20)
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
find_package(CUDAToolkit REQUIRED)

# wgmma and setmaxnreg exist on sm_90a alone. A lane brings its runtime along: static cudart.
add_library(dmuond_cuda_flags INTERFACE)
target_compile_options(dmuond_cuda_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:-O2 -lineinfo -Xfatbin=-compress-all -gencode=arch=compute_90a,code=sm_90a>)
target_link_libraries(dmuond_cuda_flags INTERFACE CUDA::cudart_static)
