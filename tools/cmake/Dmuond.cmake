# Compiler settings and the two ways in which a folder declares what it is made of:
#   dmuond_library(scheduler SOURCES … DEPS …)   a static library, alias dmuond::scheduler
#   dmuond_test(fragment_test DEPS …)            one GoogleTest program from fragment_test.cc
include_guard(GLOBAL)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo)
endif()
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1")

find_program(DMUOND_CCACHE ccache)
if(DMUOND_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${DMUOND_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${DMUOND_CCACHE})
endif()
find_program(DMUOND_LLD ld.lld)
if(DMUOND_LLD)
  add_link_options(-fuse-ld=lld)
endif()

# asan | tsan, set by the presets of the same names.
set(DMUOND_SANITIZE "" CACHE STRING "Sanitizer: empty, address or thread")
if(DMUOND_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-omit-frame-pointer -fno-sanitize-recover=undefined)
  add_link_options(-fsanitize=address,undefined)
elseif(DMUOND_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread)
  add_link_options(-fsanitize=thread)
endif()

add_library(dmuond_warnings INTERFACE)
target_compile_options(dmuond_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror -Wno-sign-compare -Wno-missing-field-initializers>)

find_package(absl REQUIRED)
find_package(Threads REQUIRED)

function(dmuond_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_library(dmuond_${name} STATIC ${ARG_SOURCES})
  add_library(dmuond::${name} ALIAS dmuond_${name})
  target_include_directories(dmuond_${name} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(dmuond_${name} PUBLIC ${ARG_DEPS} PRIVATE dmuond_warnings)
endfunction()

function(dmuond_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_executable(${name} ${name}.cc ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} dmuond_warnings GTest::gmock GTest::gtest_main)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}")
endfunction()
