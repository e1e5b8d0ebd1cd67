// device.h: one GPU of this process: its primary context, which frameworks use too, retained while a rail is open, and the words
// for what went wrong on it. Any thread; calls into the driver need a Scope, which makes the context current for a moment.
#pragma once

#include <memory>
#include <string>

#include "provider/provider.h"
#include "providers/cuda/driver.h"

namespace asyncfabric::cuda {

class Device {
 public:
  static Status open(int ordinal, std::shared_ptr<Device>* out, std::string* detail);
  static Status open(const Driver& driver, int ordinal, std::shared_ptr<Device>* out, std::string* detail);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver& driver() const { return driver_; }
  int ordinal() const { return ordinal_; }
  CUdevice handle() const { return handle_; }
  CUcontext context() const { return context_; }
  const CUuuid& uuid() const { return uuid_; }
  const std::string& name() const { return name_; }
  int attribute(int which) const;

  // Whether kernels of this GPU see what NICs write to its memory in the order of its arrival (GPUDirect RDMA).
  bool orders_nic_writes() const { return ordering_ >= kOrderedForOwner; }
  // Makes what NICs have written visible to its kernels. Blocks for as long as a read over the bus takes.
  Status flush_nic_writes() const;

  // kOk, kNoMemory or kTransport; raw is `raw_of` the driver's number.
  static Status status(CUresult result);

 private:
  Device(const Driver& driver, int ordinal) : driver_(driver), ordinal_(ordinal) {}

  const Driver& driver_;
  int ordinal_;
  CUdevice handle_ = 0;
  CUcontext context_ = nullptr;
  CUuuid uuid_{};
  std::string name_;
  int ordering_ = 0;
};

// The caller's own current context is back when it ends.
class Scope {
 public:
  explicit Scope(const Device& device) : driver_(device.driver()) { driver_.cuCtxPushCurrent_v2(device.context()); }
  ~Scope() {
    CUcontext was = nullptr;
    driver_.cuCtxPopCurrent_v2(&was);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  const Driver& driver_;
};

}  // namespace asyncfabric::cuda
