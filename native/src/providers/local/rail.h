// rail.h: LocalRail puts the rooms of this folder together behind the Rail contract. No logic of transfers lives here.
// Control calls (rail_control.cc) and engine lock calls (rail.cc) may overlap: they meet only in Regions, ConnectionTable and
// Neighbours, whose locks are held for a few instructions, never while memory is mapped, populated or drained.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "providers/local/memory/regions.h"
#include "providers/local/options.h"
#include "providers/local/peers/connection_table.h"
#include "providers/local/peers/identity.h"
#include "providers/local/peers/service.h"
#include "providers/local/transfers/poster.h"
#include "providers/local/transfers/receiver.h"

namespace asyncfabric::local {

class LocalRail : public Rail {
 public:
  static Status open(const Options& options, std::unique_ptr<Rail>* out, std::string* detail);
  ~LocalRail() override;

  const Capabilities& capabilities() const override { return capabilities_; }
  RailInfo info() const override;
  std::string address() const override { return address_; }

  Status register_memory(const Memory& memory, std::unique_ptr<LocalMemory>* out, std::string* key) override;
  Status narrow_key(LocalMemory& memory, const KeyScope& scope, std::string* key) override;
  Status revoke_memory(LocalMemory& memory, uint64_t deadline_ns, std::string* new_key) override;
  Status release_memory(std::unique_ptr<LocalMemory>& memory, uint64_t deadline_ns) override;
  Status connect(std::string_view address, uint64_t deadline_ns, std::unique_ptr<RailPeer>* out) override;
  Status attach(RailPeer& peer, std::string_view key, uint64_t patience_ns,
                std::unique_ptr<RemoteMemory>* out) override;
  Status disconnect(RailPeer& peer) override;
  void shut_out(uint64_t connection) override { rooms_->connections->shut_out(connection); }
  Status require_admission() override {
    rooms_->connections->require_admission();
    return {};
  }
  bool admit(uint64_t connection) override { return rooms_->connections->admit(connection); }

  PostResult post(std::span<const WorkRequest> requests) override { return rooms_->poster.post(requests); }
  size_t poll(std::span<RailEvent> events) override;
  int wait_fd() const override { return rooms_->waits->fd(); }
  bool prepare_wait() override;
  void cancel_wait() override;

 protected:
  // A rail built on this one, for memory that needs other ways of copying (providers/cuda), starts from an open LocalRail's parts.
  // Everything that depends on the shared files; built by open().
  struct Rooms {
    Rooms(const Options& options, std::shared_ptr<Mapping> board_file, std::shared_ptr<WaitSet> wait_set)
        : copier(options.copy),
          pool(copier, (options.copiers != 0 ? options.copiers : WorkPool::usual_size()) - 1),
          board(std::move(board_file)),
          waits(std::move(wait_set)),
          regions(board),
          connections(std::make_shared<ConnectionTable>(waits)),
          poster(copier, pool, options.foreign == ForeignChoice::kAuto),
          receiver(*connections, regions, copier),
          service(reception, waits, regions, *connections, kept) {}
    Copier copier;
    CopyPool pool;
    std::shared_ptr<Mapping> board;
    std::shared_ptr<WaitSet> waits;
    Regions regions;
    std::shared_ptr<ConnectionTable> connections;  // shared with peer handles, which may outlive the rail
    Reception reception;
    Poster poster;
    Kept kept;
    Receiver receiver;
    Service service;
  };

  LocalRail(const Options& options, std::unique_ptr<Rooms> rooms);

  // Makes the shared files and starts the service of a rail that was just constructed.
  static Status make_rooms(const Options& options, std::unique_ptr<Rooms>* out, std::string* detail);
  Status start_service(std::string* detail) { return rooms_->service.start(options_.tracer, detail); }
  // Memory of any device; `files`: what peers map instead of memory.memfd.
  Status enter(const Memory& memory, std::vector<UniqueFd> files, std::unique_ptr<LocalMemory>* out, std::string* key);
  // What the owner states of a key, and the first file behind it where it is mapped. kBusy: as ask().
  Status look_up(RailPeer& peer, std::string_view key, uint64_t deadline_ns, RemoteHandle& remote) const;
  Status reach(RemoteHandle& remote, const UniqueFd& file) const;  // a way to host memory

  // A connection that the peer's rail has not welcomed yet.
  struct Attempt {
    std::shared_ptr<Outgoing> link;
    std::shared_ptr<Mapping> segment;
    UniqueFd segment_file;
    UniqueFd our_end;  // of the doorbell, once hello was sent
    uint64_t seen_ns = 0;
  };
  Status begin(const RailAddress& target, Attempt* attempt);
  Status shake_hands(const RailAddress& target, uint64_t deadline_ns, Attempt& attempt);
  Status greet(const RailAddress& target, uint64_t deadline_ns, Attempt& attempt);
  ForeignPath choose_foreign_path(const Outgoing& link) const;
  Status ask(Outgoing& link, const RegionKey& key, uint64_t deadline_ns, RemoteHandle& remote,
             WireMessage* answer) const;
  void take_news();
  bool has_events();

  Options options_;
  Capabilities capabilities_;
  std::unique_ptr<Rooms> rooms_;
  std::string address_;
  uint64_t next_serial_ = 1;                             // [control]
  std::map<std::string, Attempt> attempts_;              // [control] by address
  std::vector<std::shared_ptr<Incoming>> news_leaving_;  // [engine lock] kept for their capacity
  std::vector<std::shared_ptr<Outgoing>> lost_;          // [engine lock] still to be reported
};

}  // namespace asyncfabric::local
