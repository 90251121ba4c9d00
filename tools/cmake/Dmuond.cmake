# Compiler settings and the two ways in which a folder declares what it is made of:
#   dmuond_library(scheduler SOURCES … DEPS …)   a static library, alias dmuond::scheduler
#   dmuond_test(fragment_test DEPS …)            one GoogleTest program from fragment_test.cc,
#                                                run in the repository's root
#   dmuond_fuzz(name_fuzz CORPUS … DEPS …)       a libFuzzer target from name_fuzz.cc; a test too
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

# Objects do not depend on where the checkout lies, so that ccache serves every checkout and every
# build directory of one machine (of two maps that fit, both g++ and ccache take the last). The
# sloppiness is what ccache needs for precompiled headers.
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${PROJECT_SOURCE_DIR}=.;-ffile-prefix-map=${PROJECT_BINARY_DIR}=./build>")
find_program(DMUOND_CCACHE ccache)
if(DMUOND_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER
    ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${DMUOND_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  endif()
endif()
find_program(DMUOND_LLD ld.lld)
if(DMUOND_LLD)
  add_link_options(-fuse-ld=lld)
endif()

# Every program and test lies in one folder, where they find each other.
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)

# asan | tsan | fuzz, set by the presets of the same names.
set(DMUOND_SANITIZE "" CACHE STRING "Sanitizer: empty, address, thread or fuzzer (clang)")
if(DMUOND_SANITIZE STREQUAL "address")
  add_compile_options(-O1 -fsanitize=address,undefined -fno-omit-frame-pointer -fno-sanitize-recover=undefined)
  add_link_options(-fsanitize=address,undefined)
elseif(DMUOND_SANITIZE STREQUAL "thread")
  add_compile_options(-O1 -fsanitize=thread)
  add_link_options(-fsanitize=thread)
elseif(DMUOND_SANITIZE STREQUAL "fuzzer")
  add_compile_options(-O1 -fsanitize=fuzzer-no-link,address,undefined -fno-omit-frame-pointer
    -fno-sanitize-recover=undefined)
  add_link_options(-fsanitize=address,undefined)
endif()

add_library(dmuond_warnings INTERFACE)
target_compile_options(dmuond_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror -Wno-sign-compare -Wno-missing-field-initializers>
  $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wthread-safety>
  # g++ 12 takes the sanitizer's own code for uninitialised reads, in std::regex and std::function.
  $<$<STREQUAL:${DMUOND_SANITIZE},address>:-Wno-maybe-uninitialized>)

find_package(absl REQUIRED)
find_package(Threads REQUIRED)

function(dmuond_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_library(dmuond_${name} STATIC ${ARG_SOURCES})
  add_library(dmuond::${name} ALIAS dmuond_${name})
  target_include_directories(dmuond_${name} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(dmuond_${name} PUBLIC ${ARG_DEPS} PRIVATE dmuond_warnings)
endfunction()

# What ./dev test --tsan builds: the tests that carry the label tsan. Debian's gRPC and abseil are not
# instrumented, so a target with this label links no gRPC, and locks with kernels/mutex.h alone.
add_custom_target(tsan_tests)

function(dmuond_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_executable(${name} ${name}.cc ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} dmuond_warnings GTest::gmock GTest::gtest_main)
  add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}")
  if("tsan" IN_LIST ARG_LABELS)
    add_dependencies(tsan_tests ${name})
  endif()
endfunction()

# name.cc has LLVMFuzzerTestOneInput(). Everywhere it is a test: the corpus (a folder beside it) and
# ITERATIONS seeded mutations of it, by tests/fuzz/driver.cc. In the preset fuzz it is also the
# program name_libfuzzer, which searches with coverage until it is stopped; the target fuzzers
# builds all of those.
add_custom_target(fuzzers)
function(dmuond_fuzz name)
  cmake_parse_arguments(ARG "" "CORPUS;ITERATIONS" "DEPS" ${ARGN})
  add_executable(${name} ${name}.cc ${PROJECT_SOURCE_DIR}/tests/fuzz/driver.cc)
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} dmuond_warnings)
  add_test(NAME ${name} COMMAND ${name} ${CMAKE_CURRENT_SOURCE_DIR}/${ARG_CORPUS} ${ARG_ITERATIONS})
  set_tests_properties(${name} PROPERTIES TIMEOUT 120)
  if(DMUOND_SANITIZE STREQUAL "fuzzer")
    add_executable(${name}_libfuzzer ${name}.cc)
    target_link_libraries(${name}_libfuzzer PRIVATE ${ARG_DEPS} dmuond_warnings)
    target_link_options(${name}_libfuzzer PRIVATE -fsanitize=fuzzer)
    add_dependencies(fuzzers ${name}_libfuzzer)
  endif()
endfunction()
