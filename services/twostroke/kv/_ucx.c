/* Python's view of _ucx_worker.c: class Worker, and the digest. Arguments are checked here or there, lifetimes by the
 * Worker; ucx.py is its only caller. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_ucx_digest.h"
#include "_ucx_worker.h"

typedef struct {
    PyObject_HEAD
    Worker worker;
    bool busy;
} WorkerObject;

static PyObject *ucx_error;

static PyObject *raise(const char *text)
{
    PyErr_SetString(ucx_error, text);
    return NULL;
}

/* Every method but wake runs between enter and leave, so that a second thread gets an error and not a broken heap. */
static Worker *enter(PyObject *self)
{
    WorkerObject *object = (WorkerObject *)self;
    if (!object->worker.open) {
        raise("the transport is closed");
        return NULL;
    }
    if (object->busy) {
        PyErr_SetString(PyExc_RuntimeError, "a second thread called a transport that is in use");
        return NULL;
    }
    object->busy = true;
    return &object->worker;
}

static void leave(PyObject *self)
{
    ((WorkerObject *)self)->busy = false;
}

static int add_settings(PyObject *dict, const char *kind, const char **settings, size_t *count, size_t most)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(dict, &at, &key, &value)) {
        const char *name = PyUnicode_AsUTF8(key), *text = PyUnicode_AsUTF8(value);
        if (name == NULL || text == NULL)
            return -1;
        if (*count == most) {
            PyErr_SetString(PyExc_ValueError, "too many UCX settings");
            return -1;
        }
        const char **triple = settings + 3 * (*count)++;
        triple[0] = name;
        triple[1] = text;
        triple[2] = kind;
    }
    return 0;
}

static int Worker_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    enum { MOST = 64 };
    const char *library, *name, *settings[3 * MOST];
    Py_ssize_t name_bytes, window;
    int direct;
    PyObject *defaults, *options;
    size_t count = 0;
    char error[TEXT_BYTES] = "";
    WorkerObject *object = (WorkerObject *)self;
    if (!PyArg_ParseTuple(args, "sy#npO!O!", &library, &name, &name_bytes, &window, &direct, &PyDict_Type, &defaults,
                          &PyDict_Type, &options))
        return -1;
    if (object->worker.open || object->busy) {
        PyErr_SetString(PyExc_RuntimeError, "already open");
        return -1;
    }
    if (add_settings(defaults, "default", settings, &count, MOST) != 0 ||
        add_settings(options, "option", settings, &count, MOST) != 0)
        return -1;
    int opened;
    object->busy = true;
    Py_BEGIN_ALLOW_THREADS
    opened = worker_open(&object->worker, library, name, (size_t)name_bytes, (size_t)window, direct, settings, count,
                         error);
    Py_END_ALLOW_THREADS
    object->busy = false;
    if (opened != 0)
        raise(error);
    return opened;
}

static void Worker_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    worker_close(&((WorkerObject *)self)->worker, 1);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *Worker_address(PyObject *self, PyObject *unused)
{
    (void)unused;
    char error[TEXT_BYTES];
    ucp_address_t *address;
    size_t nbytes;
    Worker *w = enter(self);
    if (w == NULL)
        return NULL;
    PyObject *result = NULL;
    if (worker_address(w, &address, &nbytes, error) == 0) {
        result = PyBytes_FromStringAndSize((const char *)address, (Py_ssize_t)nbytes);
        w->ucx.ucp_worker_release_address(w->worker, address);
    } else {
        raise(error);
    }
    leave(self);
    return result;
}

static PyObject *Worker_register(PyObject *self, PyObject *args)
{
    char error[TEXT_BYTES];
    unsigned long long address, nbytes;
    void *key;
    size_t key_bytes;
    int64_t id;
    if (!PyArg_ParseTuple(args, "KK", &address, &nbytes))
        return NULL;
    Worker *w = enter(self);
    if (w == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    id = worker_register(w, address, nbytes, &key, &key_bytes, error);
    Py_END_ALLOW_THREADS
    PyObject *result = NULL;
    if (id < 0) {
        raise(error);
    } else {
        result = Py_BuildValue("Ly#", (long long)id, key, (Py_ssize_t)key_bytes);
        w->ucx.ucp_rkey_buffer_release(key);
    }
    leave(self);
    return result;
}

/* keys: a list of (address, bytes, key). */
static PackedKey *read_keys(PyObject *list)
{
    Py_ssize_t count = PyList_GET_SIZE(list);
    PackedKey *keys = PyMem_Calloc((size_t)count + 1, sizeof *keys);
    if (keys == NULL)
        return (PackedKey *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned long long address, nbytes;
        const char *data;
        Py_ssize_t data_bytes;
        PyObject *item = PyList_GET_ITEM(list, i);
        if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "KKy#", &address, &nbytes, &data, &data_bytes)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "keys are tuples");
            PyMem_Free(keys);
            return NULL;
        }
        keys[i] = (PackedKey){address, nbytes, data, (size_t)data_bytes};
    }
    return keys;
}

static PyObject *Worker_connect(PyObject *self, PyObject *args)
{
    char error[TEXT_BYTES];
    const char *address;
    Py_ssize_t address_bytes;
    PyObject *list;
    double deadline;
    int64_t id;
    if (!PyArg_ParseTuple(args, "y#O!d", &address, &address_bytes, &PyList_Type, &list, &deadline))
        return NULL;
    PackedKey *keys = read_keys(list);
    if (keys == NULL)
        return NULL;
    Worker *w = enter(self);
    if (w == NULL) {
        PyMem_Free(keys);
        return NULL;
    }
    size_t count = (size_t)PyList_GET_SIZE(list);
    Py_BEGIN_ALLOW_THREADS
    id = worker_connect(w, address, keys, count, deadline, error);
    Py_END_ALLOW_THREADS
    PyMem_Free(keys);
    leave(self);
    return id < 0 ? raise(error) : PyLong_FromLongLong(id);
}

static PyObject *Worker_lanes(PyObject *self, PyObject *args)
{
    long long id;
    if (!PyArg_ParseTuple(args, "L", &id))
        return NULL;
    Worker *w = enter(self);
    if (w == NULL)
        return NULL;
    Peer *peer = worker_peer(w, id);
    PyObject *result = NULL;
    ucp_transport_entry_t lanes[MOST_LANES];
    unsigned count = peer == NULL || peer->endpoint == NULL ? 0 : lanes_of(w, peer->endpoint, lanes);
    result = PyList_New(0);
    for (unsigned i = 0; result != NULL && i < count; i++) {
        PyObject *lane = PyUnicode_FromFormat("%s/%s", lanes[i].transport_name, lanes[i].device_name);
        if (lane == NULL || PyList_Append(result, lane) != 0)
            Py_CLEAR(result);
        Py_XDECREF(lane);
    }
    leave(self);
    return result;
}

static PyObject *Worker_get(PyObject *self, PyObject *args)
{
    char error[TEXT_BYTES];
    long long peer;
    Py_buffer rows;
    double deadline;
    int64_t ticket;
    if (!PyArg_ParseTuple(args, "Ly*d", &peer, &rows, &deadline))
        return NULL;
    Worker *w = enter(self);
    int64_t *copy = w == NULL ? NULL : malloc((size_t)rows.len + 1);
    if (copy == NULL) {
        PyBuffer_Release(&rows);
        if (w != NULL)
            leave(self);
        return w == NULL ? NULL : PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    memcpy(copy, rows.buf, (size_t)rows.len);
    ticket = worker_get(w, peer, copy, (size_t)rows.len / 24, deadline, error);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&rows);
    leave(self);
    if (ticket < 0) {
        PyErr_SetString(PyExc_ValueError, error);
        return NULL;
    }
    return PyLong_FromLongLong(ticket);
}

static PyObject *Worker_signal(PyObject *self, PyObject *args)
{
    char error[TEXT_BYTES];
    long long peer;
    const char *payload;
    Py_ssize_t nbytes;
    int status;
    if (!PyArg_ParseTuple(args, "Ly#", &peer, &payload, &nbytes))
        return NULL;
    Worker *w = enter(self);
    if (w == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = worker_signal(w, peer, payload, (size_t)nbytes, error);
    Py_END_ALLOW_THREADS
    leave(self);
    if (status != 0)
        return raise(error);
    Py_RETURN_NONE;
}

static PyObject *event_tuple(const Event *event)
{
    long long id = event->id;
    switch (event->kind) {
    case EVENT_DONE:
        return Py_BuildValue("iLK", (int)event->kind, id, (unsigned long long)event->nbytes);
    case EVENT_FAILED:
        return Py_BuildValue("iLis", (int)event->kind, id, (int)event->failure, event->text);
    case EVENT_LOST:
        return Py_BuildValue("iLs", (int)event->kind, id, event->text);
    case EVENT_SIGNAL:
        return Py_BuildValue("iy#y#", (int)event->kind, event->data, (Py_ssize_t)event->sender_bytes,
                             event->data + event->sender_bytes, (Py_ssize_t)event->data_bytes);
    case EVENT_READY:
        break;
    }
    return Py_BuildValue("iL", (int)event->kind, id);
}

static PyObject *Worker_poll(PyObject *self, PyObject *args)
{
    char error[TEXT_BYTES];
    double timeout_s;
    int status;
    if (!PyArg_ParseTuple(args, "d", &timeout_s))
        return NULL;
    Worker *w = enter(self);
    if (w == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = worker_poll(w, timeout_s, error);
    Py_END_ALLOW_THREADS
    PyObject *result = status == 0 ? PyList_New(0) : raise(error);
    Event *next;
    for (Event *event = worker_take_events(w); event != NULL; event = next) {
        next = event->next;
        /* A signal whose payload could not be kept has nothing to tell. */
        if (result != NULL && (event->kind != EVENT_SIGNAL || event->data != NULL)) {
            PyObject *item = event_tuple(event);
            if (item == NULL || PyList_Append(result, item) != 0)
                Py_CLEAR(result);
            Py_XDECREF(item);
        }
        event_free(event);
    }
    leave(self);
    if (result != NULL && PyErr_CheckSignals() != 0)
        Py_CLEAR(result);
    return result;
}

static PyObject *Worker_fence(PyObject *self, PyObject *args)
{
    char error[TEXT_BYTES];
    long long peer;
    double limit_s, settle_s;
    int64_t *left = NULL;
    size_t count = 0;
    int status;
    if (!PyArg_ParseTuple(args, "Ldd", &peer, &limit_s, &settle_s))
        return NULL;
    Worker *w = enter(self);
    if (w == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = worker_fence(w, peer, limit_s, settle_s, &left, &count, error);
    Py_END_ALLOW_THREADS
    leave(self);
    if (status != 0)
        return raise(error);
    PyObject *result = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; result != NULL && i < count; i++) {
        PyObject *item = Py_BuildValue("LL", (long long)left[2 * i], (long long)left[2 * i + 1]);
        if (item == NULL)
            Py_CLEAR(result);
        else
            PyList_SET_ITEM(result, (Py_ssize_t)i, item);
    }
    free(left);
    return result;
}

static PyObject *Worker_wake(PyObject *self, PyObject *unused)
{
    (void)unused;
    /* Close runs with the GIL, or with `open` cleared under it, so the descriptor is alive here. */
    Worker *w = &((WorkerObject *)self)->worker;
    if (w->open)
        worker_wake(w);
    Py_RETURN_NONE;
}

static PyObject *Worker_close(PyObject *self, PyObject *args)
{
    double limit_s;
    if (!PyArg_ParseTuple(args, "d", &limit_s))
        return NULL;
    if (!((WorkerObject *)self)->worker.open)
        Py_RETURN_NONE;
    Worker *w = enter(self);
    if (w == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    worker_close(w, limit_s);
    Py_END_ALLOW_THREADS
    leave(self);
    Py_RETURN_NONE;
}

static PyMethodDef worker_methods[] = {
    {"address", Worker_address, METH_NOARGS, "The worker's address, for connect on another host."},
    {"register", Worker_register, METH_VARARGS, "(address, bytes) -> (id, key)."},
    {"connect", Worker_connect, METH_VARARGS, "(address, [(address, bytes, key)], deadline) -> peer."},
    {"lanes", Worker_lanes, METH_VARARGS, "(peer) -> [transport/device]."},
    {"get", Worker_get, METH_VARARGS, "(peer, rows of three int64, deadline) -> ticket."},
    {"signal", Worker_signal, METH_VARARGS, "(peer, payload)."},
    {"poll", Worker_poll, METH_VARARGS, "(timeout_s) -> [event]."},
    {"fence", Worker_fence, METH_VARARGS, "(peer, limit_s, settle_s) -> [(address, bytes)]."},
    {"wake", Worker_wake, METH_NOARGS, "Ends a poll; from any thread."},
    {"close", Worker_close, METH_VARARGS, "(limit_s)."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot worker_slots[] = {
    {Py_tp_init, Worker_init},
    {Py_tp_dealloc, Worker_dealloc},
    {Py_tp_methods, worker_methods},
    {Py_tp_new, PyType_GenericNew},
    {0, NULL},
};

static PyType_Spec worker_spec = {
    .name = "twostroke.kv._ucx.Worker",
    .basicsize = sizeof(WorkerObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = worker_slots,
};

static PyObject *digest(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer ranges, key;
    uint64_t out[2];
    if (!PyArg_ParseTuple(args, "y*y*", &ranges, &key))
        return NULL;
    bool valid = ranges.len % 16 == 0 && key.len == 8 * DIGEST_STRIPE_WORDS;
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        digest_ranges(ranges.buf, (size_t)ranges.len / 16, key.buf, out);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&ranges);
    PyBuffer_Release(&key);
    if (!valid) {
        PyErr_SetString(PyExc_ValueError, "ranges are pairs of int64, the key has a fixed length");
        return NULL;
    }
    return PyBytes_FromStringAndSize((const char *)out, sizeof out);
}

static PyObject *copy(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer rows;
    if (!PyArg_ParseTuple(args, "y*", &rows))
        return NULL;
    const int64_t *row = rows.buf;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < rows.len / 24; i++, row += 3)
        memcpy((void *)(uintptr_t)row[0], (const void *)(uintptr_t)row[1], (size_t)row[2]);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&rows);
    Py_RETURN_NONE;
}

static PyObject *load(PyObject *module, PyObject *args)
{
    (void)module;
    const char *name;
    char error[TEXT_BYTES];
    UcxLibrary ucx;
    int loaded;
    if (!PyArg_ParseTuple(args, "s", &name))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    loaded = ucx_library_load(&ucx, name, error, sizeof error);
    Py_END_ALLOW_THREADS
    return loaded != 0 ? raise(error) : Py_BuildValue("sIII", ucx.path, ucx.major, ucx.minor, ucx.release);
}

static PyMethodDef module_methods[] = {
    {"load", load, METH_VARARGS, "(path or soname) -> (path of the file, major, minor, release); it stays loaded."},
    {"copy", copy, METH_VARARGS, "(rows of destination, origin, bytes): memcpy of each; a yardstick for benchmarks."},
    {"digest", digest, METH_VARARGS, "(pairs of address and bytes, key) -> 16 bytes."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "twostroke.kv._ucx",
    .m_doc = "One-sided reads on libucp, and a digest of memory.",
    .m_size = -1,
    .m_methods = module_methods,
};

PyMODINIT_FUNC PyInit__ucx(void)
{
    PyObject *self = PyModule_Create(&module);
    PyObject *type = PyType_FromSpec(&worker_spec);
    ucx_error = PyErr_NewException("twostroke.kv._ucx.Error", NULL, NULL);
    if (self == NULL || type == NULL || ucx_error == NULL || PyModule_AddObjectRef(self, "Worker", type) != 0 ||
        PyModule_AddObjectRef(self, "Error", ucx_error) != 0)
        return NULL;
    Py_DECREF(type);
    return self;
}
