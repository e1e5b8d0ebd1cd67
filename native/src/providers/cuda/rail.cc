// rail.cc: opening and closing a cuda rail, and its engine lock calls. See rail.h.
#include "providers/cuda/rail.h"

#include <algorithm>
#include <charconv>

#include "base/clock.h"

namespace asyncfabric {

Status open_cuda_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail);

Status open_cuda_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail) {
  cuda::Options options;
  if (const Status status = cuda::parse_options(spec, &options, detail); !status.ok()) return status;
  return cuda::CudaRail::open(options, out, detail);
}

}  // namespace asyncfabric

namespace asyncfabric::cuda {
namespace {

bool touches_gpu(const WorkRequest& request) {
  if (request.kind == WorkKind::kSend || request.length == 0) return false;
  if (request.local != nullptr && static_cast<const CudaMemory*>(request.local)->on_gpu) return true;
  return request.remote != nullptr && static_cast<const CudaRemote*>(request.remote)->on_gpu;
}

// The engine has checked the key's bounds; what the owner states may be less.
bool inside(const WorkRequest& request, uint64_t bound) {
  if (request.remote_offset > bound) return false;
  const uint64_t room = bound - request.remote_offset;
  if (request.pages == nullptr) return request.length <= room;
  const uint64_t page_bytes = request.length / request.page_count;
  return page_bytes <= room && request.last_page <= room - page_bytes;
}

constexpr uint64_t kLookNs = 50'000'000;

local::Outgoing& link_of(const WorkRequest& request) { return *static_cast<local::PeerHandle*>(request.peer)->link; }

Flights& flights_of(local::Outgoing& link) { return static_cast<Flights&>(*link.companion); }

}  // namespace

Status CudaRail::open(const Options& options, std::unique_ptr<Rail>* out, std::string* detail) {
  std::shared_ptr<Device> device;
  if (const Status status = Device::open(options.device, &device, detail); !status.ok()) return status;
  std::unique_ptr<CopyQueue> queue;
  if (const Status status = CopyQueue::open(device, options.lists, options.lanes, &queue, detail); !status.ok())
    return status;
  std::unique_ptr<Rooms> rooms;
  if (const Status status = make_rooms(options.local, &rooms, detail); !status.ok()) return status;
  std::unique_ptr<CudaRail> rail(new CudaRail(options, std::move(rooms), std::move(device), std::move(queue)));
  if (const Status status = rail->start_service(detail); !status.ok()) return status;
  *out = std::move(rail);
  return {};
}

CudaRail::CudaRail(const Options& options, std::unique_ptr<Rooms> rooms, std::shared_ptr<Device> device,
                   std::unique_ptr<CopyQueue> queue)
    : LocalRail(options.local, std::move(rooms)),
      device_(std::move(device)),
      queue_(std::move(queue)),
      cuda_capabilities_(LocalRail::capabilities()) {
  // Copies go on after post(). The local rail below still moves host memory within it, in the same pieces.
  cuda_capabilities_.synchronous = false;
  cuda_capabilities_.gathers = false;  // its copy engines take what lies in one piece
  cuda_capabilities_.maps = false;
  cuda_capabilities_.list_pages = CopyQueue::kListPages;
  cuda_capabilities_.max_gpu_request_bytes = CopyQueue::kMaxFlyingBytes / 4;
  cuda_capabilities_.step_bytes = CopyQueue::kMaxFlyingBytes;
}

// Before the base class goes: its destructor lets peers' memory and ours go.
CudaRail::~CudaRail() { queue_->drain(); }

RailInfo CudaRail::info() const {
  RailInfo info = LocalRail::info();
  info.provider = "cuda";
  info.device = "cuda:" + std::to_string(device_->ordinal());
  info.library = device_->driver().path;
  info.version = "driver for CUDA " + std::to_string(device_->driver().version / 1000) + "." +
                 std::to_string(device_->driver().version % 1000 / 10) + ", " + device_->name();
  return info;
}

PostResult CudaRail::post(std::span<const WorkRequest> requests) {
  PostResult result;
  while (result.accepted < requests.size()) {
    const std::span<const WorkRequest> rest = requests.subspan(result.accepted);
    if (touches_gpu(rest.front())) {
      if (!take_off(rest.front())) {
        result.status = StatusCode::kBusy;
        break;
      }
      ++result.accepted;
      continue;
    }
    const size_t taken = post_local(rest, &result.status);
    result.accepted += taken;
    if (!result.status.ok()) break;
  }
  queue_->launch();
  return result;
}

// The run at the front that no GPU is needed for.
size_t CudaRail::post_local(std::span<const WorkRequest> rest, Status* status) {
  size_t run = 0;
  for (; run < rest.size() && !touches_gpu(rest[run]); ++run) {
    // Bytes behind copies that are under way wait for them: what an immediate means holds for all earlier requests.
    const bool bytes = rest[run].kind != WorkKind::kSend && rest[run].length > 0;
    if (bytes && !flights_of(link_of(rest[run])).empty()) break;
  }
  if (run == 0) {
    *status = StatusCode::kBusy;
    return 0;
  }
  const PostResult result = LocalRail::post(rest.first(run));
  *status = result.status;
  return result.accepted;
}

bool CudaRail::take_off(const WorkRequest& request) {
  local::Outgoing& link = link_of(request);
  const auto refuse = [&](Status status) {
    done_.push(request.tag, status);
    return true;
  };
  if (down_) return refuse(queue_->trouble());
  if (!link.alive()) return refuse(StatusCode::kPeerDead);
  if (request.remote == nullptr || request.local == nullptr || request.address == nullptr)
    return refuse(StatusCode::kInvalidArgument);
  if (request.gather != nullptr) return refuse(StatusCode::kUnsupported);
  const auto& memory = *static_cast<const CudaMemory*>(request.local);
  const auto& remote = *static_cast<const CudaRemote*>(request.remote);
  if (remote.copy_base == 0) return refuse(StatusCode::kUnsupported);
  if (!inside(request, remote.length)) return refuse(StatusCode::kOutOfBounds);
  const bool write = request.kind == WorkKind::kWrite;
  if ((remote.access & (write ? kAccessRemoteWrite : kAccessRemoteRead)) == 0) return refuse(StatusCode::kAccessDenied);

  Flights& flights = flights_of(link);
  Flight flight;
  if (!flights.hold(link, remote.slot, &flight.hold)) return false;
  if (link.board().slots[remote.slot].mark.load(std::memory_order_seq_cst) != remote.mark) {
    flights.let_go(link, flight.hold);
    return refuse(link.alive() ? StatusCode::kStaleKey : StatusCode::kPeerDead);
  }
  const auto here = reinterpret_cast<uint64_t>(request.address);
  const uint64_t there = remote.copy_base + request.remote_offset;
  const bool from_host = write ? !memory.on_gpu : !remote.on_gpu;
  const bool to_host = write ? !remote.on_gpu : !memory.on_gpu;
  flight.way = from_host ? Way::kUp : to_host ? Way::kDown : Way::kOut;
  if (request.pages == nullptr) {
    flight.ticket = queue_->add(flight.way, write ? there : here, write ? here : there, request.length,
                                {request.local, request.remote});
  } else {
    const PageStretch stretch{reinterpret_cast<uint64_t>(request.pages), write ? there : here, write ? here : there,
                              request.page_count, request.length / request.page_count};
    const bool readable = std::any_of(words_.begin(), words_.end(), [&](const auto& words) {
      return words->holds(request.pages, request.page_count * sizeof(Page));
    });
    flight.ticket = readable && queue_->takes(flight.way, stretch, request.page_bits)
                        ? queue_->add_stretch(flight.way, stretch)
                        : queue_->add_list(flight.way, stretch, request.pages);
  }
  if (flight.ticket == 0) {
    flights.let_go(link, flight.hold);
    return false;
  }
  flight.tag = request.tag;
  flight.imm = request.imm;
  flight.has_imm = request.has_imm;
  flight.signalled = request.signalled;
  flights.push(flight);
  if (!flights.listed) {
    flights.listed = true;
    flying_.push_back(link.shared_from_this());
  }
  return true;
}

void CudaRail::settle() {
  queue_->launch();
  queue_->look();
  if (!down_ && !flying_.empty() && !queue_->trouble().ok()) down_ = true;
  look_for_leavers();
  for (size_t i = 0; i < flying_.size();) {
    local::Outgoing& link = *flying_[i];
    Flights& flights = flights_of(link);
    while (!flights.empty() && land(link, flights)) {}
    if (!flights.empty()) {
      ++i;
      continue;
    }
    flights.listed = false;
    flying_[i] = std::move(flying_.back());
    flying_.pop_back();
  }
}

// A process with memory of a GPU takes a second to die after it has run its last instruction. Who is writing to it learns sooner.
void CudaRail::look_for_leavers() {
  const uint64_t now = now_ns();
  if (now - looked_ns_ < kLookNs) return;
  looked_ns_ = now;
  visits_.prune();
  for (const std::shared_ptr<local::Outgoing>& link : flying_)
    if (link->process->leaving()) rooms_->connections->lose(link->serial);
}

// The oldest request of a connection, if its copy has landed. False: not yet, or its immediate found no room.
bool CudaRail::land(local::Outgoing& link, Flights& flights) {
  const Flight flight = flights.front();
  Status status;
  if (down_) {
    status = queue_->trouble();
  } else if (!queue_->landed(flight.way, flight.ticket)) {
    return false;
  } else if (!link.alive()) {
    status = link.closed ? StatusCode::kCancelled : StatusCode::kPeerDead;
  } else if (flight.has_imm) {
    WorkRequest notice;
    notice.signalled = false;  // and tag 0: should the peer die just now, nobody waits for the answer
    notice.has_imm = true;
    notice.imm = flight.imm;
    notice.peer = link.handle;
    if (LocalRail::post({&notice, 1}).accepted == 0) return false;
  }
  flights.let_go(link, flight.hold);
  flights.pop();
  if (flight.signalled || !status.ok()) done_.push(flight.tag, status);
  return true;
}

size_t CudaRail::poll(std::span<RailEvent> events) {
  if (!flying_.empty()) settle();
  size_t count = done_.take(events);
  if (down_ && !reported_down_ && count < events.size()) {
    reported_down_ = true;
    RailEvent& event = events[count++];
    event = RailEvent();
    event.kind = RailEventKind::kRailDown;
    event.status = queue_->trouble();
  }
  return count + LocalRail::poll(events.subspan(count));
}

bool CudaRail::prepare_wait() {
  // Nothing rings when a copy lands: while one is under way the worker stays awake. A copy is short.
  if (!flying_.empty() || !done_.empty() || (down_ && !reported_down_)) return false;
  return LocalRail::prepare_wait();
}

// A copy that a GPU has begun cannot be called back. It ends within milliseconds, and is reported then.
Status CudaRail::disconnect(RailPeer& peer) {
  const std::shared_ptr<local::Outgoing> link = static_cast<local::PeerHandle&>(peer).link;
  const Status status = LocalRail::disconnect(peer);
  return flights_of(*link).empty() ? status : Status(StatusCode::kUnsupported);
}

Status parse_options(const RailSpec& spec, Options* out, std::string* detail) {
  RailSpec rest;
  rest.provider = "local";
  const std::string_view word = spec.device;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), out->device);
  if (!word.empty() && (error != std::errc() || end != word.data() + word.size() || out->device < 0)) {
    *detail = "cuda: the device is a number as in 'cuda:0', not '" + spec.device + "'";
    return StatusCode::kNoProvider;
  }
  for (const auto& [name, value] : spec.options) {
    if (name == "lists" && (value == "kernel" || value == "batch" || value == "single")) {
      out->lists = value == "kernel" ? ListMode::kKernel : value == "batch" ? ListMode::kBatch : ListMode::kSingle;
    } else if (name == "lanes" && value.size() == 1 && value[0] >= '1' && value[0] <= '4') {
      out->lanes = static_cast<uint32_t>(value[0] - '0');
    } else if (name == "lists" || name == "lanes") {
      *detail = "cuda: option " + name + "=" + value + " is not one of lists=kernel|batch|single, lanes=1..4";
      return StatusCode::kInvalidArgument;
    } else {
      rest.options.emplace_back(name, value);
    }
  }
  return local::parse_options(rest, &out->local, detail);
}

}  // namespace asyncfabric::cuda
