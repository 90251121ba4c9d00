# Compiler settings and the two ways in which a folder declares what it is made of:
#   dmuond_library(scheduler SOURCES … DEPS … HEADERS …)  a static library, alias dmuond::scheduler
#   dmuond_test(fragment_test DEPS …)            one GoogleTest program from fragment_test.cc,
#                                                run in the repository's root
#   dmuond_fuzz(name_fuzz CORPUS … DEPS …)       a libFuzzer target from name_fuzz.cc; a test too
include_guard(GLOBAL)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# Libraries and programs are compiled alike, for the same precompiled headers to fit both.
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_COMPILE_OPTIONS_PIE -fPIC)
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
  else()
    add_compile_options("SHELL:-Xclang -fno-pch-timestamp")
  endif()
endif()
find_program(DMUOND_LLD ld.lld)
if(DMUOND_LLD)
  add_link_options(-fuse-ld=lld)
endif()

# Every program and test lies in one folder, where they find each other.
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)

# asan | tsan, set by the presets of the same names; both are clang's. The address sanitizer's build is also
# the fuzzers', who watch which edges are taken, not what is compared: that would be a call for each comparison.
# Of undefined behaviour three kinds are left out, which take a quarter of the compiler's time: a null pointer
# ends the program anyway, objects that are too small the address sanitizer sees, as do wrong types mostly.
# Alignment, another quarter, is checked in the folders where bytes become numbers, by DMUOND_BYTES_OPTIONS.
# Tests' own code and what protoc writes are instrumented for less, since they are not what is tested.
set(DMUOND_SANITIZE "" CACHE STRING "Sanitizer: empty, address or thread")
set(DMUOND_BYTES_OPTIONS)
set(DMUOND_TEST_OPTIONS)
set(DMUOND_GENERATED_OPTIONS)
if(DMUOND_SANITIZE STREQUAL "address")
  set(coverage inline-8bit-counters,pc-table)
  add_compile_options(-O1 -fsanitize=address,undefined -fno-sanitize=alignment,null,object-size,vptr
    -fno-omit-frame-pointer -fno-sanitize-recover=undefined -fsanitize-coverage=${coverage})
  add_link_options(-fsanitize=address,undefined)
  set(DMUOND_BYTES_OPTIONS -fsanitize=alignment)
  set(DMUOND_TEST_OPTIONS -fno-sanitize=undefined -fno-sanitize-coverage=${coverage})
  set(DMUOND_GENERATED_OPTIONS -fno-sanitize=address,undefined)
elseif(DMUOND_SANITIZE STREQUAL "thread")
  add_compile_options(-O1 -fsanitize=thread)
  add_link_options(-fsanitize=thread)
endif()

# Several sources of a library, or several tests, as one: half the time from nothing, and more when one of them
# has changed. For builds that are made once; always under sanitizers.
option(DMUOND_UNITY "Compile several sources at a time" OFF)
if(DMUOND_SANITIZE)
  set(DMUOND_UNITY ON)
endif()
set(CMAKE_UNITY_BUILD_BATCH_SIZE 12)
function(dmuond_unity target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${DMUOND_UNITY})
endfunction()

add_library(dmuond_warnings INTERFACE)
target_compile_options(dmuond_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror -Wno-sign-compare -Wno-missing-field-initializers>
  $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wthread-safety>)

find_package(absl REQUIRED)
find_package(Threads REQUIRED)

# dmuond_headers(name HEADERS … DEPS … OPTIONS …): headers that are precompiled once, with what DEPS need and
# OPTIONS. Of other projects, or generated: for a change of one of ours would compile everything anew.
# dmuond_use_headers(target name): they come first in every source of the target, whose options must fit.
function(dmuond_headers name)
  cmake_parse_arguments(ARG "" "" "HEADERS;DEPS;OPTIONS" ${ARGN})
  add_library(dmuond_${name}_headers OBJECT ${PROJECT_SOURCE_DIR}/tools/cmake/headers.cc)
  target_compile_options(dmuond_${name}_headers PRIVATE ${ARG_OPTIONS})
  target_link_libraries(dmuond_${name}_headers PRIVATE ${ARG_DEPS})
  target_precompile_headers(dmuond_${name}_headers PRIVATE ${ARG_HEADERS})
  if(DMUOND_CCACHE)
    set_target_properties(dmuond_${name}_headers PROPERTIES CXX_COMPILER_LAUNCHER
      "${PROJECT_SOURCE_DIR}/tools/cmake/fresh-output.sh;${CMAKE_CXX_COMPILER_LAUNCHER}")
  endif()
endfunction()
function(dmuond_use_headers target name)
  target_precompile_headers(${target} REUSE_FROM dmuond_${name}_headers)
endfunction()

set(DMUOND_COMMON_HEADERS <algorithm> <array> <atomic> <chrono> <cstdint> <cstring> <deque> <functional> <map>
  <memory> <mutex> <optional> <set> <span> <string> <thread> <tuple> <utility> <vector>
  <absl/status/status.h> <absl/status/statusor.h> <absl/strings/str_cat.h>)
set(DMUOND_MESSAGE_HEADERS <dmuond/v1/admin.pb.h> <dmuond/v1/lane.pb.h> <dmuond/v1/peer.pb.h>
  <dmuond/v1/snapshot.pb.h> <dmuond/v1/trainer.pb.h>)
dmuond_headers(common DEPS absl::status absl::statusor absl::strings HEADERS ${DMUOND_COMMON_HEADERS})

# HEADERS: common, the default; messages; grpc; or none, where the options are the target's own.
function(dmuond_library name)
  cmake_parse_arguments(ARG "" "HEADERS" "SOURCES;DEPS" ${ARGN})
  if(NOT ARG_HEADERS)
    set(ARG_HEADERS common)
  endif()
  add_library(dmuond_${name} STATIC ${ARG_SOURCES})
  add_library(dmuond::${name} ALIAS dmuond_${name})
  target_include_directories(dmuond_${name} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(dmuond_${name} PUBLIC ${ARG_DEPS} PRIVATE dmuond_warnings)
  if(NOT ARG_HEADERS STREQUAL "none")
    dmuond_use_headers(dmuond_${name} ${ARG_HEADERS})
  endif()
  dmuond_unity(dmuond_${name})
endfunction()

# What ./dev test --tsan builds: the tests that carry the label tsan. Debian's gRPC and abseil are not
# instrumented, so a target with this label links no gRPC, and locks with base/mutex.h alone.
add_custom_target(tsan_tests)

# name.cc is compiled for speed of compiling, with -O0; or, if it COMPUTES so much that this would cost more
# than it saves, with -O1. What it lists in SOURCES, simulators and such, is optimised like everything else.
# HEADERS: test, the default; test_messages; test_grpc; of COMPUTES always computing_test. ALONE: it replaces
# something of the whole program's, so that no other test may be in it (dmuond_test_program).
function(dmuond_test name)
  cmake_parse_arguments(ARG "ALONE;COMPUTES" "HEADERS;TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 1200)  # of what hangs, on a busy machine, too
  endif()
  if(DMUOND_SANITIZE)  # takes three times as long
    math(EXPR ARG_TIMEOUT "3 * ${ARG_TIMEOUT}")
  endif()
  if(ARG_COMPUTES)
    set(ARG_HEADERS computing_test)
  elseif(NOT ARG_HEADERS)
    set(ARG_HEADERS test)
  endif()
  set(program ${name})
  set(filter)
  if(DMUOND_UNITY AND NOT ARG_ALONE AND NOT ARG_SOURCES)
    dmuond_test_program()
  else()
    add_executable(${name} ${name}.cc)
  endif()
  target_link_libraries(${program} PRIVATE ${ARG_DEPS} dmuond_warnings GTest::gmock GTest::gtest_main)
  target_compile_options(${program} PRIVATE $<IF:$<BOOL:${ARG_COMPUTES}>,-O1,-O0> ${DMUOND_TEST_OPTIONS})
  dmuond_use_headers(${program} ${ARG_HEADERS})
  if(ARG_SOURCES)
    add_library(${name}_parts OBJECT ${ARG_SOURCES})
    target_link_libraries(${name}_parts PRIVATE ${ARG_DEPS} dmuond_warnings GTest::gmock)
    dmuond_use_headers(${name}_parts common)
    dmuond_unity(${name}_parts)
    target_link_libraries(${name} PRIVATE ${name}_parts)
  endif()
  add_test(NAME ${name} COMMAND ${program} ${filter} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  # Daemons under test end where a state machine meets an event that it cannot have.
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}"
    ENVIRONMENT DMUOND_CHECKED=1)
  dmuond_test_cost(${name})
  if("tsan" IN_LIST ARG_LABELS)
    add_dependencies(tsan_tests ${name})
  endif()
endfunction()

# The order in which tests begin, and how many at once, by two lists of tests/CMakeLists.txt: ctest runs twice as many
# as there are processors, because most wait more than they compute; one that computes counts as two.
function(dmuond_test_cost name)
  list(FIND DMUOND_SLOWEST ${name} place)
  if(NOT place EQUAL -1)
    math(EXPR cost "100 - ${place}")
    set_tests_properties(${name} PROPERTIES COST ${cost})
  endif()
  if(name IN_LIST DMUOND_COMPUTING)
    set_tests_properties(${name} PROPERTIES PROCESSORS 2)
  endif()
endfunction()

# Puts name.cc into a program with those tests of its folder that have the same headers, and are for the thread
# sanitizer or not, as it is: a third of the time that each would take. Sets `program`, and `filter` for name.cc's
# own tests; `name` is a target that builds the program. That no test is left out is a test, too.
macro(dmuond_test_program)  # a part of dmuond_test
  file(RELATIVE_PATH program ${PROJECT_SOURCE_DIR}/tests ${CMAKE_CURRENT_SOURCE_DIR})
  set(program ${program}_${ARG_HEADERS})
  if("tsan" IN_LIST ARG_LABELS)
    string(APPEND program _tsan)
  endif()
  string(REPLACE "/" "_" program ${program}_test)
  if(NOT TARGET ${program})
    add_executable(${program})
    set_target_properties(${program} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)
    add_test(NAME ${program}_rest
      COMMAND ${program} "--gtest_filter=-$<JOIN:$<TARGET_PROPERTY:${program},DMUOND_FILTERS>,:>")
    set_tests_properties(${program}_rest PROPERTIES PASS_REGULAR_EXPRESSION "Running 0 tests")
  endif()
  target_sources(${program} PRIVATE ${name}.cc)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${name}.cc)
  file(STRINGS ${name}.cc suites REGEX "^(TEST|TEST_F|TEST_P|RC_GTEST_PROP)\\(")
  list(TRANSFORM suites REPLACE "^[A-Z_]+\\(([A-Za-z0-9_]+).*" "\\1")
  list(REMOVE_DUPLICATES suites)
  if(NOT suites)
    message(FATAL_ERROR "${name}.cc has no tests")
  endif()
  list(TRANSFORM suites REPLACE "(.+)" "\\1.*:*/\\1.*")
  set_property(TARGET ${program} APPEND PROPERTY DMUOND_FILTERS ${suites})
  list(JOIN suites ":" filter)
  set(filter --gtest_filter=${filter})
  add_custom_target(${name})
  add_dependencies(${name} ${program})
endmacro()

# name.cc has LLVMFuzzerTestOneInput(). Everywhere it is a test: the corpus (a folder beside it) and ITERATIONS
# seeded mutations of it, a tenth under sanitizers, by tests/fuzz/driver.cc. In the preset asan it is also the
# program name_libfuzzer, which searches with coverage until it is stopped; the test name_minute, with the label
# fuzz, lets it do so for a minute. HEADERS are messages, or grpc for what links it.
function(dmuond_fuzz name)
  cmake_parse_arguments(ARG "" "CORPUS;ITERATIONS;HEADERS" "DEPS" ${ARGN})
  if(NOT ARG_HEADERS)
    set(ARG_HEADERS messages)
  endif()
  add_library(${name}_target OBJECT ${name}.cc)
  dmuond_use_headers(${name}_target ${ARG_HEADERS})
  target_link_libraries(${name}_target PUBLIC ${ARG_DEPS} PRIVATE dmuond_warnings)
  if(NOT TARGET fuzz_driver)
    add_library(fuzz_driver OBJECT ${PROJECT_SOURCE_DIR}/tests/fuzz/driver.cc)
    target_link_libraries(fuzz_driver PRIVATE dmuond_warnings)
  endif()
  if(DMUOND_SANITIZE)
    math(EXPR ARG_ITERATIONS "${ARG_ITERATIONS} / 10")
  endif()
  add_executable(${name})
  target_link_libraries(${name} PRIVATE ${name}_target fuzz_driver)
  add_test(NAME ${name} COMMAND ${name} ${CMAKE_CURRENT_SOURCE_DIR}/${ARG_CORPUS} ${ARG_ITERATIONS})
  set_tests_properties(${name} PROPERTIES TIMEOUT 600)
  dmuond_test_cost(${name})
  if(DMUOND_SANITIZE STREQUAL "address")
    add_executable(${name}_libfuzzer)
    target_link_libraries(${name}_libfuzzer PRIVATE ${name}_target)
    target_link_options(${name}_libfuzzer PRIVATE -fsanitize=fuzzer)
    set(found ${CMAKE_BINARY_DIR}/fuzz/${name})  # inputs that reach more than the corpus does
    file(MAKE_DIRECTORY ${found})
    # Budgets of one input, as in tests/fuzz/driver.cc.
    add_test(NAME ${name}_minute COMMAND ${name}_libfuzzer -max_total_time=60 -print_final_stats=1
      -timeout=60 -rss_limit_mb=2048 -malloc_limit_mb=1024
      -artifact_prefix=${found}- ${found} ${CMAKE_CURRENT_SOURCE_DIR}/${ARG_CORPUS})
    set_tests_properties(${name}_minute PROPERTIES TIMEOUT 180 LABELS fuzz PROCESSORS 2)
  endif()
endfunction()
