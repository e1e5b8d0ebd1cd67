// memory.h: memory as a GPU's engines may touch it: pages of our own (a virtual memory handle that travels as a file descriptor),
// memory of a framework (legacy IPC handle of its whole allocation), host memory pinned for the copy engines, and a peer's memory
// mapped for OUR device. A mapping opened for the owner's device copies at a tenth of the speed. Control thread.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"
#include "provider/gpu_rail.h"
#include "provider/memory.h"
#include "providers/cuda/device.h"

namespace asyncfabric::cuda {

// How a peer gets at a registered range.
enum class Export : uint8_t { kHost = 0, kHandle = 1, kLegacy = 2, kChunks = 3 };

// What a region's key holds behind the key of the local rail.
struct Passport {
  Export kind = Export::kHost;
  CUuuid device{};
  uint64_t mapped = 0;  // length of the whole allocation, or of all chunks,
  uint64_t offset = 0;  // where in it the region begins
  uint64_t chunk = 0;   // kChunks: length of each, with a handle of its own

  uint64_t handles() const { return kind == Export::kHandle ? 1 : kind == Export::kChunks ? mapped / chunk : 0; }
  CUipcMemHandle legacy{};
};

std::string encode_passport(std::string_view local_key, const Passport& passport);
Status decode_passport(std::string_view bytes, std::string_view* local_key,
                       Passport* out);  // hostile bytes are refused

class GpuPages final : public DeviceMemory {
 public:
  static Status allocate(std::shared_ptr<Device> device, uint64_t length, std::unique_ptr<DeviceMemory>* out,
                         std::string* why);
  ~GpuPages() override;
  void* base() const override { return reinterpret_cast<void*>(base_); }
  int handle_fd() const override { return handle_.get(); }

 private:
  explicit GpuPages(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  std::shared_ptr<Device> device_;
  UniqueFd handle_;
  CUdeviceptr base_ = 0;
  uint64_t reserved_ = 0;
  bool mapped_ = false;
};

constexpr uint64_t kMostChunks = 4096;  // of one region: a descriptor each. 80 GiB of PyTorch's expandable segments

// Fills the passport of memory on `device` and, for memory of virtual memory handles, the descriptors that a peer imports.
Status export_memory(const Device& device, const Memory& memory, Passport* out, std::vector<UniqueFd>* handles,
                     std::string* why);

// A dma-buf that holds a range of memory on `device`, from `offset` in it on: what NICs register.
Status export_dmabuf(const Device& device, const void* base, uint64_t length, UniqueFd* out, uint64_t* offset);

// Page-locked for as long as somebody holds it. Ranges that begin at one address share one lock. Null: the system refused, and
// copies to and from there are made by way of the driver's own buffers, slower.
class Pinned {
 public:
  static std::shared_ptr<Pinned> hold(std::shared_ptr<Device> device, void* base, uint64_t length);
  ~Pinned();
  bool holds(const void* start, uint64_t length) const {
    const auto begin = reinterpret_cast<uint64_t>(start) - reinterpret_cast<uint64_t>(base_);
    return begin <= length_ && length <= length_ - begin;
  }

 private:
  Pinned(std::shared_ptr<Device> device, void* base, uint64_t length)
      : device_(std::move(device)), base_(base), length_(length) {}

  std::shared_ptr<Device> device_;
  void* base_;
  uint64_t length_;
};

// A peer's GPU memory in our address space.
class Visit {
 public:
  // `handles`: the descriptors of kHandle and kChunks. `own_base`: where the region lies when its owner is this process, else 0.
  static Status open(std::shared_ptr<Device> device, const Passport& passport, uint64_t length,
                     std::span<const UniqueFd> handles, uint64_t own_base, std::unique_ptr<Visit>* out,
                     std::string* why);
  ~Visit();
  uint64_t base() const { return base_; }

 private:
  explicit Visit(std::shared_ptr<Device> device) : device_(std::move(device)) {}
  Status import(const Passport& passport, std::span<const UniqueFd> handles, std::string* why);
  Status open_legacy(const Passport& passport, uint64_t length, std::string* why);
  Status see_neighbour(const CUuuid& uuid, std::string* why);

  std::shared_ptr<Device> device_;
  CUdeviceptr base_ = 0;
  CUdeviceptr legacy_ = 0;
  CUdeviceptr reserved_ = 0;
  uint64_t reserved_bytes_ = 0;
  uint64_t mapped_bytes_ = 0;  // from the front
};

}  // namespace asyncfabric::cuda
