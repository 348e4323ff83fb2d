/* One UCX context and worker with its peers, transfers and events. Knows nothing of Python.
 *
 * Two ways to read. A direct read is a UCX GET, for lanes whose hardware or kernel does it (cma, RDMA). Over other lanes,
 * tcp above all, UCX emulates GET, and then a source whose reader dies in the middle is ended by UCX ("Fatal: unexpected
 * error", 1.16 to 1.23 alike), and copies from whatever address it is told. So there the reader asks the source with a
 * message, which answers with messages (_ucx_serve.c) that the reader copies to their place, or drops when they are no
 * longer wanted.
 *
 * Wire, all as active messages: READER greets with HELLO (its address), SOURCE connects back and answers WELCOME; then
 * READ, answered by DATA; BYE from either ends it. All carry the reader's nonce of this connection.
 *
 * One thread at a time may be inside any function but worker_wake. Blocking functions say so. Times are seconds of
 * CLOCK_MONOTONIC. */
#ifndef TWOSTROKE_UCX_WORKER_H
#define TWOSTROKE_UCX_WORKER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "_ucx_library.h"

#define TEXT_BYTES 256

/* Nothing here may be taken for, or by, a function of another library in the process. */
#pragma GCC visibility push(hidden)

typedef struct {
    uint64_t address, nbytes;
    int64_t id;
    ucp_mem_h memory;
} Region;

typedef struct {
    uint64_t address, nbytes;
    ucp_rkey_h key;
} Key;

typedef struct Peer Peer;
typedef struct Batch Batch;
typedef struct Worker Worker;

typedef struct Reader Reader;
typedef struct Greeting Greeting;
typedef struct Interface Interface;

enum { MOST_LANES = 32 };
enum { AM_SIGNAL = 1, AM_HELLO, AM_WELCOME, AM_READ, AM_DATA, AM_BYE };

typedef struct {
    uint64_t nonce;
} Hello; /* also WELCOME and BYE; HELLO's payload: u32 name bytes, name, worker address */

typedef struct {
    uint64_t nonce, operation, address, nbytes;
} Read;

typedef struct {
    uint64_t nonce, operation, offset;
} Data; /* offset REFUSED: the range is not registered */

#define REFUSED UINT64_MAX

/* One read in flight: a GET that UCX has not completed, or a READ that is not answered in full. */
typedef struct Op {
    Batch *batch;
    uint64_t id, address, nbytes, got;
    struct Op *previous, *next;
} Op;

struct Peer {
    Worker *worker;
    int64_t id;
    uint64_t nonce;
    ucp_ep_h endpoint;
    Key *keys; /* by address */
    size_t key_count;
    Op operations; /* head of a ring */
    size_t operation_count, message_count, flush_count;
    double connect_deadline;
    bool flushed, greeted, ready, direct, lost, closed;
    ucs_status_t status;
    Peer *next;
};

/* A list of (local address, remote address, bytes), posted as the window allows. */
struct Batch {
    int64_t ticket;
    Peer *peer;
    int64_t *rows;
    size_t row_count, row;
    uint64_t row_offset, nbytes;
    size_t in_flight;
    double deadline;
    bool over; /* its event is out; kept until in_flight is 0 */
    Batch *next;
};

typedef enum { EVENT_DONE, EVENT_FAILED, EVENT_READY, EVENT_LOST, EVENT_SIGNAL } EventKind;
typedef enum { FAILED_DEADLINE, FAILED_PEER_LOST, FAILED_FENCED, FAILED_ERROR } Failure;

typedef struct Event {
    EventKind kind;
    int64_t id; /* ticket or peer */
    Failure failure;
    uint64_t nbytes;
    char text[TEXT_BYTES];
    char *data; /* signal: sender, then payload */
    size_t sender_bytes, data_bytes;
    struct Event *next;
} Event;

struct Worker {
    UcxLibrary ucx;
    ucp_context_h context;
    ucp_worker_h worker;
    int ucx_fd, wake_fd;
    atomic_int woken;
    char *name;
    size_t name_bytes;
    size_t window;
    Region *regions; /* by address */
    size_t region_count;
    bool direct;
    Peer *peers;
    Reader *readers;
    Greeting *greetings;
    Batch *batches; /* in order of arrival */
    Event *first_event, *last_event;
    int64_t last_id;
    uint64_t last_operation;
    Interface *interfaces;
    int network_fd;
    double network_look_s;
    bool open, replaced;
};

typedef struct {
    uint64_t address, nbytes;
    const void *data;
    size_t data_bytes;
} PackedKey;

/* All return 0 or a positive id, or -1 with a line in `error` (TEXT_BYTES). */
int worker_open(Worker *w, const char *library, const char *name, size_t name_bytes, size_t window, bool direct,
                const char *const *settings, size_t setting_count, char *error);
int worker_address(Worker *w, ucp_address_t **address, size_t *nbytes, char *error);
int64_t worker_register(Worker *w, uint64_t address, uint64_t nbytes, void **key, size_t *key_bytes, char *error);
int64_t worker_connect(Worker *w, const void *address, const PackedKey *keys, size_t key_count, double deadline,
                       char *error);
Peer *worker_peer(Worker *w, int64_t id);
/* Takes `rows` over, also on failure. Posts nothing when a row lies outside the registered memory of either side. */
int64_t worker_get(Worker *w, int64_t peer, int64_t *rows, size_t row_count, double deadline, char *error);
int worker_signal(Worker *w, int64_t peer, const void *payload, size_t nbytes, char *error);
/* Blocks up to timeout_s, until an event, a wake or a Unix signal. -1: nothing moves any more. */
int worker_poll(Worker *w, double timeout_s, char *error);
Event *worker_take_events(Worker *w);
void event_free(Event *event);
void worker_wake(Worker *w);
/* Blocks. Closes the peer and waits up to limit_s for its operations to end, then settle_s more. `left` gets pairs
 * (address, bytes) of the operations that did not end, for the caller to free. The peer is gone afterwards. */
int worker_fence(Worker *w, int64_t peer, double limit_s, double settle_s, int64_t **left, size_t *left_count,
                 char *error);
/* Blocks up to limit_s. Ends what is open and frees everything; the worker cannot be used again. What UCX has stays
 * with it where it makes no progress any more. */
void worker_close(Worker *w, double limit_s);

/* ---- between the files: _ucx_worker.c ---- */

double now_s(void);
/* Writes "what: status" into `error`; returns -1. */
int fail(Worker *w, char *error, const char *what, ucs_status_t status);
Event *event_new(Worker *w, EventKind kind, int64_t id);
/* Tables of structs that begin with their address, sorted by it: order, and index of the last one not above `address`
 * or -1. */
int by_address(const void *a, const void *b);
int find_at(const void *table, size_t count, size_t stride, uint64_t address);
Region *region_at(const Worker *w, uint64_t address);
ucs_status_t set_handler(Worker *w, unsigned id, ucp_am_recv_callback_t callback);
/* Blocks until `end`. Sets *endpoint to NULL. */
void close_endpoint(Worker *w, ucp_ep_h *endpoint, unsigned flags, double end);

/* ---- _ucx_network.c ---- */

void network_open(Worker *w);
void network_close(Worker *w);
/* Its lanes' interfaces matter from now on. */
void network_used(Worker *w, ucp_ep_h endpoint);
/* Whether one that matters was replaced; then UCX must make no progress. */
bool network_replaced(Worker *w);

/* ---- _ucx_peer.c ---- */

/* Sends a message, which counts in *counter until it is sent. A payload with `memory` stays where it is until then. */
int message_send(Worker *w, ucp_ep_h endpoint, unsigned id, const void *header, size_t header_bytes,
                 const void *payload, size_t payload_bytes, ucp_mem_h memory, size_t *counter, char *error);
ucs_status_t peer_set_handlers(Worker *w);
/* Writes what an endpoint's lanes use, at most MOST_LANES of them; returns how many. */
unsigned lanes_of(const Worker *w, ucp_ep_h endpoint, ucp_transport_entry_t *lanes);
Peer *peer_by_nonce(Worker *w, uint64_t nonce);
bool peer_idle(const Peer *peer);
void peers_advance(Worker *w, double time);
/* Frees closed peers that no callback can name any more. */
void sweep_peers(Worker *w);
void say_bye(Worker *w, Peer *peer);

/* ---- _ucx_transfer.c ---- */

ucs_status_t transfer_set_handlers(Worker *w);
/* Posts what the windows allow, ends what is complete, late or without a peer, here and in the other files. Returns
 * whether more can be posted at once. */
bool advance_all(Worker *w);
void op_end(Op *op);
void batch_failed(Worker *w, Batch *batch, Failure failure, const char *text);
void peer_batches_failed(Worker *w, Peer *peer, Failure failure, const char *text);

/* ---- _ucx_serve.c ---- */

ucs_status_t serve_set_handlers(Worker *w);
/* Whether more can be sent at once. */
bool serve_advance(Worker *w);
bool serve_idle(const Worker *w);
void serve_bye(Worker *w, uint64_t nonce);
void serve_close(Worker *w, double end);
void serve_free(Worker *w);

#pragma GCC visibility pop

#endif
