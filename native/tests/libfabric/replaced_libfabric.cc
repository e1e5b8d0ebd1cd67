// replaced_libfabric.cc: a library in place of libfabric.so.1, see replaced_libfabric.h. Its rules are those of libfabric's efa provider
// as its sources state them. Each copy of the file is a library of its own, with decisions of its own.
#pragma GCC visibility push(default)
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#pragma GCC visibility pop

#include <cstdlib>
#include <cstring>

#include "replaced_libfabric.h"

namespace {

using asyncfabric::testing::ReplacedLibfabric;

constexpr uint64_t kByDmabuf = uint64_t{1} << 40;
constexpr int kEmulatedWrite = -(0xefa << 16) + 2;
constexpr int kCudaApiPermitted = 10;

ReplacedLibfabric decisions;

struct Dmabuf {
  int fd;
  uint64_t offset;
  size_t length;
  void* base;
};

template <typename Fid>
int close_fid(fid* object) {
  delete reinterpret_cast<Fid*>(object);
  return 0;
}

int bind(fid*, fid*, uint64_t) { return 0; }
int control(fid*, int, void*) { return 0; }

template <typename Fid>
fid handle() {
  static fi_ops ops{};
  ops.close = close_fid<Fid>;
  ops.bind = bind;
  ops.control = control;
  fid made{};
  made.ops = &ops;
  return made;
}

int register_memory(fid*, const fi_mr_attr* attributes, uint64_t flags, fid_mr** out) {
  if ((flags & kByDmabuf) != 0) {
    if (decisions.requested < FI_VERSION(1, 20)) return -FI_EBADFLAGS;
    if (decisions.dmabuf_answer != 0) return decisions.dmabuf_answer;
    const Dmabuf& buffer = *reinterpret_cast<const Dmabuf*>(attributes->mr_iov);
    decisions.iova = reinterpret_cast<uint64_t>(buffer.base) + buffer.offset;
    decisions.offset = buffer.offset;
    decisions.length = buffer.length;
    decisions.fd = buffer.fd;
    ++decisions.dmabufs;
  } else if (attributes->iface == FI_HMEM_CUDA) {
    ++decisions.plain;
  }
  static uint64_t keys = 0;
  auto* const mr = new fid_mr{};
  mr->fid = handle<fid_mr>();
  mr->mem_desc = mr;
  mr->key = ++keys;
  *out = mr;
  return 0;
}

int open_domain(fid_fabric*, fi_info*, fid_domain** out, void*);
int open_av(fid_domain*, fi_av_attr*, fid_av** out, void*) {
  *out = new fid_av{};
  (*out)->fid = handle<fid_av>();
  return 0;
}

ssize_t nothing_came(fid_cq*, void*, size_t) { return -FI_EAGAIN; }

int open_cq(fid_domain*, fi_cq_attr*, fid_cq** out, void*) {
  static fi_ops_cq ops{};
  ops.read = nothing_came;
  *out = new fid_cq{};
  (*out)->fid = handle<fid_cq>();
  (*out)->ops = &ops;
  return 0;
}

int set_option(fid*, int, int option, const void*, size_t) {
  return option == kCudaApiPermitted ? decisions.cuda_option : 0;
}

int get_option(fid*, int, int option, void* value, size_t* length) {
  if (option != kEmulatedWrite) return -FI_ENOPROTOOPT;
  if (decisions.emulated_answer != 0) return decisions.emulated_answer;
  if (*length < sizeof(bool)) return -FI_ETOOSMALL;
  *static_cast<bool*>(value) = decisions.emulates_writes;
  *length = sizeof(bool);
  return 0;
}

int get_name(fid*, void* name, size_t* length) {
  std::memset(name, 7, 32);
  *length = 32;
  return 0;
}

ssize_t post_receive(fid_ep*, void*, size_t, void*, fi_addr_t, void*) { return 0; }

int open_endpoint(fid_domain*, fi_info*, fid_ep** out, void*) {
  static fi_ops_ep ops{};
  static fi_ops_cm meetings{};
  static fi_ops_msg messages{};
  ops.setopt = set_option;
  ops.getopt = get_option;
  meetings.getname = get_name;
  messages.recv = post_receive;
  *out = new fid_ep{};
  (*out)->fid = handle<fid_ep>();
  (*out)->ops = &ops;
  (*out)->cm = &meetings;
  (*out)->msg = &messages;
  return 0;
}

int open_domain(fid_fabric*, fi_info*, fid_domain** out, void*) {
  static fi_ops_domain ops{};
  static fi_ops_mr memory{};
  ops.av_open = open_av;
  ops.cq_open = open_cq;
  ops.endpoint = open_endpoint;
  memory.regattr = register_memory;
  *out = new fid_domain{};
  (*out)->fid = handle<fid_domain>();
  (*out)->ops = &ops;
  (*out)->mr = &memory;
  return 0;
}

template <typename T>
T* copy_of(const T* from) {
  return from != nullptr ? new T(*from) : new T{};
}
char* copy_of(const char* from) { return from != nullptr ? strdup(from) : nullptr; }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

ReplacedLibfabric* replaced_libfabric() { return &decisions; }
int ibv_fork_init() { return decisions.fork_init; }

uint32_t fi_version() { return decisions.version; }
const char* fi_strerror(int) { return "an error of the replaced library"; }

fi_info* fi_dupinfo(const fi_info* from) {
  const fi_info empty{};
  const fi_info& old = from != nullptr ? *from : empty;
  auto* const info = new fi_info(old);
  info->next = nullptr;
  info->tx_attr = copy_of(old.tx_attr);
  info->rx_attr = copy_of(old.rx_attr);
  info->ep_attr = copy_of(old.ep_attr);
  info->domain_attr = copy_of(old.domain_attr);
  info->domain_attr->name = copy_of(const_cast<const char*>(info->domain_attr->name));
  info->fabric_attr = copy_of(old.fabric_attr);
  info->fabric_attr->prov_name = copy_of(const_cast<const char*>(info->fabric_attr->prov_name));
  return info;
}

void fi_freeinfo(fi_info* info) {
  while (info != nullptr) {
    fi_info* const next = info->next;
    std::free(info->domain_attr->name);
    std::free(info->fabric_attr->prov_name);
    delete info->tx_attr;
    delete info->rx_attr;
    delete info->ep_attr;
    delete info->domain_attr;
    delete info->fabric_attr;
    delete info;
    info = next;
  }
}

int fi_getinfo(uint32_t version, const char*, const char*, uint64_t, const fi_info* hints, fi_info** out) {
  if (version > decisions.version) return -FI_ENOSYS;
  decisions.requested = version;
  if (hints == nullptr || hints->fabric_attr->prov_name == nullptr ||
      std::strcmp(hints->fabric_attr->prov_name, "efa") != 0)
    return -FI_ENODATA;
  fi_info* const info = fi_dupinfo(hints);
  info->fabric_attr->api_version = version;
  info->addr_format = FI_ADDR_EFA;
  info->ep_attr->max_msg_size = 1 << 30;
  info->domain_attr->cq_data_size = 4;
  info->domain_attr->mr_key_size = 4;
  if (info->domain_attr->name == nullptr) info->domain_attr->name = strdup("rdmap0s6-rdm");
  *out = info;
  return 0;
}

int fi_fabric(fi_fabric_attr*, fid_fabric** out, void*) {
  static fi_ops_fabric ops{};
  ops.domain = open_domain;
  *out = new fid_fabric{};
  (*out)->fid = handle<fid_fabric>();
  (*out)->ops = &ops;
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
