# What is installed: one archive with the messages and stubs inside, the public headers, and CMake's
# config files. The wire contract's own headers stay here: they are the library's business.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)
find_package(Protobuf REQUIRED)
find_package(gRPC REQUIRED)

add_library(dmuond_client_installed STATIC
  $<TARGET_OBJECTS:dmuond_client> $<TARGET_OBJECTS:dmuond_services>
  $<TARGET_OBJECTS:dmuond_messages> $<TARGET_OBJECTS:dmuond_details>)
set_target_properties(dmuond_client_installed PROPERTIES
  EXPORT_NAME client OUTPUT_NAME dmuond_client LINKER_LANGUAGE CXX
  ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/installed)
target_compile_features(dmuond_client_installed INTERFACE cxx_std_20)
target_include_directories(dmuond_client_installed INTERFACE
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(dmuond_client_installed INTERFACE
  gRPC::grpc++ protobuf::libprotobuf absl::status absl::statusor absl::strings Threads::Threads)

install(TARGETS dmuond_client_installed EXPORT dmuondTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT client)
install(DIRECTORY include/dmuond TYPE INCLUDE COMPONENT client)
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/dmuond)
install(EXPORT dmuondTargets NAMESPACE dmuond:: DESTINATION ${config_dir} COMPONENT client)
configure_package_config_file(cmake/dmuondConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/dmuondConfig.cmake INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/dmuondConfigVersion.cmake
  VERSION ${PROJECT_VERSION} COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/dmuondConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/dmuondConfigVersion.cmake
  DESTINATION ${config_dir} COMPONENT client)
