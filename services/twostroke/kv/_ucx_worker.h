/* One UCX context and worker with its peers, transfers and events. Knows nothing of Python.
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

/* One GET that UCX has not completed. */
typedef struct Op {
    Batch *batch;
    uint64_t address, nbytes;
    struct Op *previous, *next;
} Op;

/* A message that UCX has not finished sending; header and payload follow. */
typedef struct {
    Peer *peer;
    char data[];
} Message;

struct Peer {
    Worker *worker;
    int64_t id;
    ucp_ep_h endpoint;
    Key *keys; /* by address */
    size_t key_count;
    Op operations; /* head of a ring */
    size_t operation_count, message_count, flush_count;
    double connect_deadline;
    bool ready, lost, closed;
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
    Peer *peers;
    Batch *batches; /* in order of arrival */
    Event *first_event, *last_event;
    int64_t last_id;
    bool open;
};

typedef struct {
    uint64_t address, nbytes;
    const void *data;
    size_t data_bytes;
} PackedKey;

/* All return 0 or a positive id, or -1 with a line in `error` (TEXT_BYTES). */
int worker_open(Worker *w, const char *library, const char *name, size_t name_bytes, size_t window,
                const char *const *settings, size_t setting_count, char *error);
int worker_address(Worker *w, ucp_address_t **address, size_t *nbytes, char *error);
int64_t worker_register(Worker *w, uint64_t address, uint64_t nbytes, void **key, size_t *key_bytes, char *error);
int worker_unregister(Worker *w, int64_t id, char *error);
int64_t worker_connect(Worker *w, const void *address, const PackedKey *keys, size_t key_count, double deadline,
                       char *error);
Peer *worker_peer(Worker *w, int64_t id);
/* Takes `rows` over, also on failure. Posts nothing when a row lies outside the registered memory of either side. */
int64_t worker_get(Worker *w, int64_t peer, int64_t *rows, size_t row_count, double deadline, char *error);
int worker_signal(Worker *w, int64_t peer, const void *payload, size_t nbytes, char *error);
/* Blocks up to timeout_s, until an event, a wake or a Unix signal. */
void worker_poll(Worker *w, double timeout_s);
Event *worker_take_events(Worker *w);
void event_free(Event *event);
void worker_wake(Worker *w);
/* Blocks. Closes the peer and waits up to limit_s for its operations to end, then settle_s more. `left` gets pairs
 * (address, bytes) of the operations that did not end, for the caller to free. The peer is gone afterwards. */
int worker_fence(Worker *w, int64_t peer, double limit_s, double settle_s, int64_t **left, size_t *left_count,
                 char *error);
/* Blocks up to limit_s. Ends what is open and frees everything; the worker cannot be used again. */
void worker_close(Worker *w, double limit_s);

#endif
