#include "dmuond/client/device_arenas.h"

#include <map>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/mps.h"
#include "base/status_macros.h"
#include "client/cpp/src/cuda_driver.h"
#include "client/cpp/src/status.h"

namespace dmuond::client {
namespace {

// Returns from the enclosing function with the error of a call of the driver.
#define DMUOND_TRY(driver, function, call)                                         \
  if (absl::Status tried = (driver).Check((driver).call, function); !tried.ok()) { \
    return tried;                                                                  \
  }

// The context is the calling thread's as long as it lives.
class InContext {
 public:
  InContext(const CudaDriver& driver, CUcontext context) : driver_(driver) {
    driver_.context_get_current(&before_);
    driver_.context_set_current(context);
  }
  ~InContext() { driver_.context_set_current(before_); }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;

 private:
  const CudaDriver& driver_;
  CUcontext before_ = nullptr;
};

}  // namespace

// A device, its primary context, which is kept, and what every use of it needs.
class DeviceArenas::Device {
 public:
  static absl::StatusOr<std::shared_ptr<const Device>> Open(int ordinal) {
    ASSIGN_OR_RETURN(const CudaDriver* const driver, CudaDriver::Get());
    const CudaDriver& d = *driver;
    auto device = std::make_shared<Device>(d);
    int count = 0;
    DMUOND_TRY(d, "cuDeviceGetCount", device_get_count(&count));
    if (ordinal < 0 || ordinal >= count) {
      return absl::NotFoundError(
          absl::StrCat("there is no device ", ordinal, "; this process sees ", count));
    }
    DMUOND_TRY(d, "cuDeviceGet", device_get(&device->device_, ordinal));
    CUuuid uuid{};
    DMUOND_TRY(d, "cuDeviceGetUuid", device_get_uuid(&uuid, device->device_));
    device->uuid_ = "GPU-";
    for (int i = 0; i < 16; ++i) {
      if (i == 4 || i == 6 || i == 8 || i == 10) device->uuid_ += '-';
      absl::StrAppendFormat(&device->uuid_, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    }
    const CUresult retained = OnceMpsHasRecovered(kMpsPatienceForContext, [&] {
      return d.primary_context_retain(&device->context_, device->device_);
    });
    RETURN_IF_ERROR(d.Check(retained, "cuDevicePrimaryCtxRetain"));
    const InContext in_context(d, device->context_);
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->device_};
    DMUOND_TRY(d, "cuMemGetAllocationGranularity",
               mem_get_allocation_granularity(&device->granularity_, &properties,
                                              CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    DMUOND_TRY(d, "cuStreamCreate", stream_create(&device->copies_, CU_STREAM_NON_BLOCKING));
    return device;
  }
  explicit Device(const CudaDriver& of) : driver(of) {}
  ~Device() {
    if (copies_ == nullptr) return;
    const InContext in_context(driver, context_);
    driver.stream_synchronize(copies_);
    driver.stream_destroy(copies_);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  [[nodiscard]] InContext Enter() const { return {driver, context_}; }
  [[nodiscard]] const std::string& uuid() const { return uuid_; }
  [[nodiscard]] CUdevice ordinal() const { return device_; }
  [[nodiscard]] size_t Rounded(size_t bytes) const {
    return (bytes + granularity_ - 1) / granularity_ * granularity_;
  }
  [[nodiscard]] size_t granularity() const { return granularity_; }
  // REQUIRES: entered.
  absl::Status Allow(CUdeviceptr address, size_t bytes) const {
    CUmemAccessDesc access{};
    access.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device_};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    DMUOND_TRY(driver, "cuMemSetAccess", mem_set_access(address, bytes, &access, 1));
    return absl::OkStatus();
  }
  // Waits for all that is enqueued, in whatever stream.
  absl::Status Wait() const {
    const InContext in_context = Enter();
    DMUOND_TRY(driver, "cuCtxSynchronize", context_synchronize());
    return absl::OkStatus();
  }
  // Of memory of host and device, done when it returns. Not in step with any other stream.
  absl::Status Copy(const void* to, const void* from, size_t bytes) const {
    const InContext in_context = Enter();
    DMUOND_TRY(driver, "cuMemcpyAsync",
               memcpy_async(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from),
                            bytes, copies_));
    DMUOND_TRY(driver, "cuStreamSynchronize", stream_synchronize(copies_));
    return absl::OkStatus();
  }

  const CudaDriver& driver;

 private:
  CUdevice device_ = 0;
  std::string uuid_;
  CUcontext context_ = nullptr;
  size_t granularity_ = 0;
  CUstream copies_ = nullptr;
};

class DeviceArenas::DeviceMemory final : public Memory {
 public:
  static absl::StatusOr<std::unique_ptr<Memory>> Map(std::shared_ptr<const Device> device, int fd,
                                                     size_t bytes) {
    const InContext in_context = device->Enter();
    const CudaDriver& driver = device->driver;
    std::unique_ptr<DeviceMemory> memory(new DeviceMemory(std::move(device), bytes));
    DMUOND_TRY(driver, "cuMemImportFromShareableHandle",
               mem_import(&memory->handle_, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    memory->imported_ = true;
    DMUOND_TRY(driver, "cuMemAddressReserve",
               mem_address_reserve(&memory->address_, memory->mapped_bytes_,
                                   memory->device_->granularity(), 0, 0));
    RETURN_IF_ERROR(memory->MapHere());
    return memory;
  }
  ~DeviceMemory() override {
    const InContext in_context = device_->Enter();
    if (mapped_) device_->driver.mem_unmap(address_, mapped_bytes_);
    if (address_ != 0) device_->driver.mem_address_free(address_, mapped_bytes_);
    if (imported_) device_->driver.mem_release(handle_);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  [[nodiscard]] std::byte* data() const override { return reinterpret_cast<std::byte*>(address_); }
  [[nodiscard]] size_t bytes() const override { return bytes_; }
  absl::Status Read(std::byte* to) const override {
    RETURN_IF_ERROR(device_->Wait());
    return device_->Copy(to, data(), bytes_);
  }
  absl::Status Write(const std::byte* from) override { return device_->Copy(data(), from, bytes_); }

  absl::Status MoveTo(Memory& other) override {
    auto& place = static_cast<DeviceMemory&>(other);
    RETURN_IF_ERROR(device_->Wait());
    const InContext in_context = device_->Enter();
    const CudaDriver& driver = device_->driver;
    DMUOND_TRY(driver, "cuMemUnmap", mem_unmap(address_, mapped_bytes_));
    mapped_ = false;
    DMUOND_TRY(driver, "cuMemUnmap", mem_unmap(place.address_, mapped_bytes_));
    place.mapped_ = false;
    std::swap(address_, place.address_);
    return MapHere();
  }

 private:
  DeviceMemory(std::shared_ptr<const Device> device, size_t bytes)
      : device_(std::move(device)), bytes_(bytes), mapped_bytes_(device_->Rounded(bytes)) {}
  // REQUIRES: entered.
  absl::Status MapHere() {
    DMUOND_TRY(device_->driver, "cuMemMap", mem_map(address_, mapped_bytes_, 0, handle_, 0));
    mapped_ = true;
    return device_->Allow(address_, mapped_bytes_);
  }

  const std::shared_ptr<const Device> device_;
  const size_t bytes_;
  const size_t mapped_bytes_;
  CUmemGenericAllocationHandle handle_ = 0;
  bool imported_ = false;
  CUdeviceptr address_ = 0;  // 0: none is reserved
  bool mapped_ = false;
};

// The trainer's, whatever becomes of this object.
class DeviceArenas::OwnMemory final : public Memory {
 public:
  OwnMemory(std::shared_ptr<const Device> device, std::byte* data, size_t bytes)
      : device_(std::move(device)), data_(data), bytes_(bytes) {}
  [[nodiscard]] std::byte* data() const override { return data_; }
  [[nodiscard]] size_t bytes() const override { return bytes_; }
  absl::Status Read(std::byte* to) const override {
    RETURN_IF_ERROR(device_->Wait());
    return device_->Copy(to, data_, bytes_);
  }
  absl::Status Write(const std::byte* from) override { return device_->Copy(data_, from, bytes_); }
  // It lies there already.
  absl::Status MoveTo(Memory& /*place*/) override { return absl::OkStatus(); }

 private:
  const std::shared_ptr<const Device> device_;
  std::byte* const data_;
  const size_t bytes_;
};

// Stores go by a stream of their own: in the trainer's, each would hold up what comes after it.
class DeviceArenas::DeviceWords final : public Words {
 public:
  static absl::StatusOr<std::unique_ptr<Words>> Make(std::shared_ptr<const Device> device,
                                                     void* page, size_t bytes) {
    const InContext in_context = device->Enter();
    const CudaDriver& driver = device->driver;
    std::unique_ptr<DeviceWords> words(new DeviceWords(std::move(device), page));
    DMUOND_TRY(driver, "cuMemHostRegister",
               mem_host_register(page, bytes, CU_MEMHOSTREGISTER_DEVICEMAP));
    words->registered_ = true;
    DMUOND_TRY(driver, "cuMemHostGetDevicePointer",
               mem_host_get_device_pointer(&words->device_page_, page, 0));
    DMUOND_TRY(driver, "cuStreamCreate", stream_create(&words->stores_, CU_STREAM_NON_BLOCKING));
    DMUOND_TRY(driver, "cuEventCreate", event_create(&words->reached_, CU_EVENT_DISABLE_TIMING));
    return words;
  }
  ~DeviceWords() override {
    Finish().IgnoreError();  // the page goes, whatever became of the device
    const InContext in_context = device_->Enter();
    for (const auto& [stream, event] : waits_) device_->driver.event_destroy(event);
    if (reached_ != nullptr) device_->driver.event_destroy(reached_);
    if (stores_ != nullptr) device_->driver.stream_destroy(stores_);
    if (registered_) device_->driver.mem_host_unregister(page_);
  }
  DeviceWords(const DeviceWords&) = delete;
  DeviceWords& operator=(const DeviceWords&) = delete;

  absl::Status StoreAfter(std::optional<CUstream_st*> stream, std::span<uint64_t* const> words,
                          uint64_t value) override {
    const std::lock_guard lock(mutex_);
    const InContext in_context = device_->Enter();
    const CudaDriver& driver = device_->driver;
    if (stream.has_value()) {
      RETURN_IF_ERROR(CheckNotCaptured(*stream, "MarkReady"));
      DMUOND_TRY(driver, "cuEventRecord", event_record(reached_, *stream));
      DMUOND_TRY(driver, "cuStreamWaitEvent", stream_wait_event(stores_, reached_, 0));
    }
    for (uint64_t* const word : words) {
      DMUOND_TRY(driver, "cuStreamWriteValue64",
                 stream_write_value(stores_, OnDevice(word), value, CU_STREAM_WRITE_VALUE_DEFAULT));
    }
    return absl::OkStatus();
  }

  absl::Status WaitFor(CUstream_st* stream, std::span<uint64_t* const> words,
                       uint64_t value) override {
    const std::lock_guard lock(mutex_);
    const InContext in_context = device_->Enter();
    const CudaDriver& driver = device_->driver;
    RETURN_IF_ERROR(CheckNotCaptured(stream, "WaitPublished"));
    CUevent& waited = waits_[stream];
    if (waited == nullptr) {
      DMUOND_TRY(driver, "cuEventCreate", event_create(&waited, CU_EVENT_DISABLE_TIMING));
    }
    // The stores that come next wait for events of this stream. A stream that an event holds up
    // takes its process's turns on the GPU, from the lane that is waited for; one that a word holds
    // up takes none.
    for (CUstream waiting : {stream, stores_}) {
      for (const uint64_t* const word : words) {
        DMUOND_TRY(driver, "cuStreamWaitValue64",
                   stream_wait_value(waiting, OnDevice(word), value, CU_STREAM_WAIT_VALUE_GEQ));
      }
    }
    DMUOND_TRY(driver, "cuEventRecord", event_record(waited, stream));
    return absl::OkStatus();
  }

  absl::Status Check() override {
    const std::lock_guard lock(mutex_);
    const InContext in_context = device_->Enter();
    const CUresult result = device_->driver.stream_query(stores_);
    if (result == CUDA_ERROR_NOT_READY) return absl::OkStatus();
    return device_->driver.Check(result, "cuStreamQuery");
  }

  absl::Status Finish() override {
    const std::lock_guard lock(mutex_);
    const InContext in_context = device_->Enter();
    const CudaDriver& driver = device_->driver;
    if (stores_ != nullptr) DMUOND_TRY(driver, "cuStreamSynchronize", stream_synchronize(stores_));
    for (const auto& [stream, event] : waits_) {
      DMUOND_TRY(driver, "cuEventSynchronize", event_synchronize(event));
    }
    return absl::OkStatus();
  }

 private:
  DeviceWords(std::shared_ptr<const Device> device, void* page)
      : device_(std::move(device)), page_(page) {}
  [[nodiscard]] CUdeviceptr OnDevice(const uint64_t* word) const {
    return device_page_ + (reinterpret_cast<uintptr_t>(word) - reinterpret_cast<uintptr_t>(page_));
  }
  // A graph would store and wait for the attempt of its capture at every launch.
  absl::Status CheckNotCaptured(CUstream stream, const char* call) const {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    DMUOND_TRY(device_->driver, "cuStreamIsCapturing", stream_is_capturing(stream, &status));
    if (status == CU_STREAM_CAPTURE_STATUS_NONE) return absl::OkStatus();
    return WrongState(absl::StrCat(
        call,
        ": the stream is being captured into a CUDA graph; call it after the graph's launch"));
  }

  const std::shared_ptr<const Device> device_;
  void* const page_;
  bool registered_ = false;
  CUdeviceptr device_page_ = 0;
  std::mutex mutex_;  // of what follows
  CUstream stores_ = nullptr;
  CUevent reached_ = nullptr;          // how far a stream has come that is to be followed
  std::map<CUstream, CUevent> waits_;  // the last wait of each stream
};

absl::StatusOr<std::shared_ptr<Arenas>> DeviceArenas::Open(int ordinal) {
  ASSIGN_OR_RETURN(std::shared_ptr<const Device> device, Device::Open(ordinal));
  return std::shared_ptr<Arenas>(new DeviceArenas(std::move(device)));
}

std::string DeviceArenas::device_uuid() const { return device_->uuid(); }

absl::StatusOr<std::unique_ptr<Arenas::Memory>> DeviceArenas::Map(int fd, size_t bytes) {
  return DeviceMemory::Map(device_, fd, bytes);
}

absl::StatusOr<Arenas::Own> DeviceArenas::Export(std::byte* memory, size_t bytes) {
  constexpr uintptr_t kAlignment = 16;
  const InContext in_context = device_->Enter();
  const CudaDriver& driver = device_->driver;
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  const auto wrong = [&](auto... why) {
    return absl::InvalidArgumentError(
        absl::StrCat(bytes, " bytes at ", absl::Hex(address), " ", why...));
  };
  int ordinal = -1;
  CUdeviceptr base = 0;
  size_t whole = 0;
  if (driver.pointer_get_attribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address) !=
          CUDA_SUCCESS ||
      driver.mem_get_address_range(&base, &whole, address) != CUDA_SUCCESS) {
    return wrong("are no memory of a GPU");
  }
  if (ordinal != device_->ordinal()) {
    return wrong("are memory of device ", ordinal, ", and the arenas are on device ",
                 device_->ordinal());
  }
  if (address % kAlignment != 0) return wrong("do not begin at a multiple of ", kAlignment);
  // Before the range is looked at: of what cuMemMap has put together of several pieces, as
  // PyTorch's expandable_segments:True does, the driver gives the range of one piece.
  CUipcMemHandle handle{};
  if (const CUresult result = driver.ipc_get(&handle, address); result != CUDA_SUCCESS) {
    return absl::FailedPreconditionError(absl::StrCat(
        bytes, " bytes at ", absl::Hex(address),
        " cannot be exported: only memory of cudaMalloc (cuMemAlloc) has such a handle, not "
        "that of cudaMallocAsync or cuMemMap. In PyTorch set PYTORCH_CUDA_ALLOC_CONF and "
        "PYTORCH_ALLOC_CONF without expandable_segments:True and backend:cudaMallocAsync, or leave "
        "the arena to the daemon (",
        driver.Check(result, "cuIpcGetMemHandle").message(), ")"));
  }
  if (bytes == 0 || bytes > whole - (address - base)) {
    return wrong("do not lie within their allocation, which has ", whole, " bytes from ",
                 absl::Hex(base), " on");
  }
  Own own;
  own.base_offset = address - base;
  own.allocation_bytes = whole;
  DMUOND_TRY(driver, "cuPointerGetAttribute",
             pointer_get_attribute(&own.buffer_id, CU_POINTER_ATTRIBUTE_BUFFER_ID, address));
  own.handle.assign(handle.reserved, sizeof(handle.reserved));
  own.memory = std::make_unique<OwnMemory>(device_, memory, bytes);
  return own;
}

absl::StatusOr<std::unique_ptr<Arenas::Words>> DeviceArenas::MakeWords(void* page, size_t bytes) {
  return DeviceWords::Make(device_, page, bytes);
}

#undef DMUOND_TRY

}  // namespace dmuond::client
