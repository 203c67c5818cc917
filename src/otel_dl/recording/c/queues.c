/* Queues: `get` of a worker's index queue, and `put` of its data queue: (worker, original, in Python). */

#include "native.h"

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Worker *worker;
    PyObject *original; /* the queue's own */
    PyObject *noticed;  /* (message): tells the worker in Python */
} Queue;

static PyObject *
get_call(Queue *queue, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    PyObject *message = PyObject_Vectorcall(queue->original, args, nargsf, kwnames);
    if (message != NULL && !worker_received(queue->worker, message)) {
        PyObject *answer = PyObject_CallOneArg(queue->noticed, message);
        if (answer == NULL)
            Py_CLEAR(message);
        Py_XDECREF(answer);
    }
    return message;
}

static PyObject *
put_call(Queue *queue, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    if (PyVectorcall_NARGS(nargsf) > 0 && !worker_answers(queue->worker, args[0])) {
        PyObject *answer = PyObject_CallOneArg(queue->noticed, args[0]);
        if (answer == NULL)
            return NULL;
        Py_DECREF(answer);
    }
    return PyObject_Vectorcall(queue->original, args, nargsf, kwnames);
}

static int
queue_init(Queue *self, PyObject *args, PyObject *kwargs, vectorcallfunc call)
{
    static char *keywords[] = {"worker", "original", "noticed", NULL};
    PyObject *worker, *original, *noticed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO", keywords, &WorkerType, &worker, &original, &noticed))
        return -1;
    Py_INCREF(worker);
    Py_XSETREF(self->worker, (Worker *)worker);
    Py_INCREF(original);
    Py_XSETREF(self->original, original);
    Py_INCREF(noticed);
    Py_XSETREF(self->noticed, noticed);
    self->vectorcall = call;
    return 0;
}

static int
get_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return queue_init((Queue *)self, args, kwargs, (vectorcallfunc)get_call);
}

static int
put_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return queue_init((Queue *)self, args, kwargs, (vectorcallfunc)put_call);
}

static PyObject *
queue_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Queue *self = (Queue *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->vectorcall = not_made;
    return (PyObject *)self;
}

static int
queue_traverse(Queue *self, visitproc visit, void *arg)
{
    Py_VISIT(self->worker);
    Py_VISIT(self->original);
    Py_VISIT(self->noticed);
    return 0;
}

static int
queue_clear(Queue *self)
{
    self->vectorcall = not_made;
    Py_CLEAR(self->worker);
    Py_CLEAR(self->original);
    Py_CLEAR(self->noticed);
    return 0;
}

static void
queue_dealloc(Queue *self)
{
    PyObject_GC_UnTrack(self);
    queue_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

#define QUEUE(NAME, INIT)                                                                                             \
    {                                                                                                                 \
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = "otel_dl.recording._native." NAME,                                   \
        .tp_basicsize = sizeof(Queue),                                                                                \
        .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, .tp_new = queue_new,        \
        .tp_init = INIT, .tp_call = PyVectorcall_Call, .tp_vectorcall_offset = offsetof(Queue, vectorcall),           \
        .tp_traverse = (traverseproc)queue_traverse, .tp_clear = (inquiry)queue_clear,                                \
        .tp_dealloc = (destructor)queue_dealloc,                                                                      \
    }

PyTypeObject GetType = QUEUE("Get", get_init);
PyTypeObject PutType = QUEUE("Put", put_init);
