// peer.h: another fabric as we see it: its lanes, its handshake, its messages. Everything here is touched under the engine lock only, but for
// the numbers that statistics read.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "asyncfabric/types.h"
#include "engine/counters/closings.h"
#include "engine/counters/generations.h"
#include "engine/regions/region.h"
#include "engine/wire.h"
#include "provider/provider.h"
#include "secret/proof.h"

namespace asyncfabric {

struct Op;

enum class PeerState : uint32_t { kConnecting = 0, kConnected = 1, kLost = 2, kDisconnected = 3 };

struct Lane {
  uint32_t rail = 0;         // ours
  uint32_t remote_rail = 0;  // theirs: index into the rail keys of their regions
  std::string address;       // of their rail
  std::unique_ptr<RailPeer> handle;
  bool welcomed = false;  // they answered our hello on this lane
  bool closed = false;
  bool down = false;  // nothing gets through now, but its rail works on it
};

using Inbound =
    std::pair<uint32_t, uint64_t>;  // a rail of ours, and a connection of a peer to it; 0: the rail does not know

constexpr uint64_t kMaxMaskedLanes = 64;  // lanes are bits of a mask
constexpr uint32_t kMessageCredits = 64;  // user messages to a peer that its program has not taken yet

struct Peer {
  // All that is known of it is a hello, which anybody may send: statistics leave it out.
  bool is_stranger() const { return !active && !was_connected; }
  bool ended() const { return state == PeerState::kLost || state == PeerState::kDisconnected; }
  // By disconnect() of this fabric, so the next use connects again; a goodbye of the peer leaves kPeerDead.
  bool disconnected_here() const {
    return state == PeerState::kDisconnected && lost_because.code == StatusCode::kClosed;
  }
  // False: it came over too many others.
  bool came_over(Inbound way) {
    if (std::find(inbound.begin(), inbound.end(), way) != inbound.end()) return true;
    if (inbound.size() >= kMaxMaskedLanes) return false;
    inbound.push_back(way);
    return true;
  }
  uint32_t life() const { return static_cast<uint32_t>(id % kMostLives) + 1; }

  PeerId id = 0;
  uint64_t incarnation = 0;
  uint32_t their_life = 0;  // of their entry for us; 0 until they sent it
  std::string address;
  PeerState state = PeerState::kConnecting;
  Status lost_because;
  uint64_t lost_ns = 0;       // when it ended
  Inbound hello_came_over{};  // the one that made this entry
  bool wiring = false;        // the control thread is opening the lanes
  bool wired = false;         // the lanes' handles exist
  bool active = false;        // we want to connect (not only they to us)
  bool greeted = false;       // a greeting left, so it may know of which opening our counters are
  bool reports_loss = false;
  bool asynchronous = false;  // counted in Core::asynchronous_peers
  bool same_host = false;
  std::string protocol;
  std::vector<Lane> lanes;
  std::vector<Inbound> inbound;  // over which its messages came
  std::vector<double> weights;
  uint32_t next_lane = 0;
  std::vector<Op*> parked;                // waiting for the connection or for an attached key
  std::vector<uint64_t> connect_cookies;  // control calls to answer
  uint64_t welcome_due = 0;               // lanes of theirs that sent hello before our handles existed
  uint64_t answered_lanes = 0;            // of theirs, since the time before next_answer_ns began
  uint64_t next_answer_ns = 0;            // when they are answered again
  uint64_t answer_gap_ns = 0;
  uint64_t rejects = 0;  // incarnation that they looked for at our address
  secret::Nonce nonce = secret::fresh_nonce();
  secret::Nonce their_nonce{};         // of their entry for us, from their hello or challenge
  std::map<uint64_t, Inbound> proven;  // lane of theirs -> the connection that its proof came over
  uint64_t admitted_lanes = 0;         // of theirs, by their challenges
  uint64_t connect_until_ns = 0;
  uint64_t next_hello_ns = 0;
  uint64_t hello_gap_ns = 0;
  bool was_connected = false;
  bool met = false;        // a message shows that it knows our entry for it: the connection stands in both directions
  bool received = false;   // something of it since the last look
  uint64_t looked_ns = 0;  // last look at `received`; 0: we do not watch it now
  uint64_t silent_ns = 0;  // how long we looked without receiving anything
  uint64_t next_ping_ns = 0;
  uint32_t next_pulse = 0;    // lane of the next heartbeat
  std::vector<KeyId> asking;  // keys that they have not judged yet; asked again until they answer
  uint64_t next_ask_ns = 0;
  uint64_t next_reminder_ns = 0;  // when what a broken connection may have swallowed is sent again; 0: nothing is open
  uint64_t outstanding = 0;       // signalled work requests
  uint32_t visitors = 0;          // jobs of the control thread that use its lanes without the engine lock
  std::vector<std::unique_ptr<RemoteMemory>> graveyard;  // attachments of a lost peer, until nothing is outstanding

  // Two-sided user messages: numbered, put in order again at the receiver, held back by credits.
  uint32_t credits() const { return static_cast<uint32_t>(taken_there + kMessageCredits - next_sequence); }
  uint64_t next_sequence = 0;
  uint64_t taken_there = 0;   // of our messages, by their program
  uint64_t taken_here = 0;    // of theirs, as far as it was collected
  uint64_t credited = 0;      // of those, what they were sent
  bool wants_credit = false;  // they wait for room and know all that was taken
  std::vector<Op*> waiting_for_credit;
  uint64_t next_expected = 0;
  std::map<uint64_t, std::string> out_of_order;

  // Work that counts is held back while only a part is known: it would be stamped with an old generation, and count for nobody.
  bool knows_a_part() const { return generations_from != 0 && generations_from != Generations::kEnd; }
  Generations counter_generations;  // of theirs
  uint32_t generations_from = 0;    // they are known up to here; 0: nothing was reported yet
  ClosingsAsked closings_asked;     // of our counters
  ClosingsTaken closings_taken;     // of theirs

  std::atomic<uint64_t> bytes_sent{0};     // relaxed, for statistics
  std::atomic<uint64_t> ops_in_flight{0};  // relaxed, for statistics
};

}  // namespace asyncfabric
