/* Hook: an attribute's stand-in, which binds as a function does. */

#include "native.h"

/* Our own exception is set: to `fault`, which may raise what a signal handler of the user's raised; -1 then. */
int
own_fault(Hook *hook)
{
    PyObject *error = take_exception();
    PyObject *answer = PyObject_CallOneArg(hook->fault, error);
    Py_DECREF(error);
    if (answer == NULL)
        return -1;
    Py_DECREF(answer);
    return 0;
}

/* The call has failed with the exception that is set, and goes on to do so. */
void
call_failed(Hook *hook, PyObject *kind, PyObject *subject, long long start)
{
    PyObject *error = take_exception();
    PyObject *reading = PyLong_FromLongLong(start);
    PyObject *answer = NULL;
    if (reading != NULL)
        answer = PyObject_CallFunctionObjArgs(hook->failed, kind, subject, reading, error, NULL);
    Py_XDECREF(reading);
    if (answer == NULL && own_fault(hook) < 0) { /* a signal handler of the user's raised meanwhile */
        PyObject *raised = take_exception();
        PyObject *context = PyException_GetContext(raised);
        if (context == NULL && raised != error)
            PyException_SetContext(raised, error);
        else
            Py_DECREF(error);
        Py_XDECREF(context);
        put_exception(raised);
        return;
    }
    Py_XDECREF(answer);
    put_exception(error);
}

/* The call has returned `result`, and is recorded by Python; the result, or NULL. */
PyObject *
call_ended(Hook *hook, PyObject *kind, PyObject *subject, long long start, PyObject *result)
{
    PyObject *reading = PyLong_FromLongLong(start);
    PyObject *answer = NULL;
    if (reading != NULL)
        answer = PyObject_CallFunctionObjArgs(hook->ended, kind, subject, reading, NULL);
    Py_XDECREF(reading);
    if (answer == NULL && own_fault(hook) < 0)
        Py_CLEAR(result);
    Py_XDECREF(answer);
    return result;
}

static int
hook_init(Hook *self, PyObject *args, PyObject *kwargs, vectorcallfunc call)
{
    static char *keywords[] = {"fast", "kind", "original", "recorded", "ended", "failed", "fault",
                               "optimizes", "own", "is_grad_enabled", NULL};
    PyObject *fast, *kind, *original, *recorded, *ended, *failed, *fault, *is_grad_enabled = Py_None;
    int optimizes = 0, own = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OOOOO|$ppO", keywords, &FastPathType, &fast, &PyLong_Type,
                                     &kind, &original, &recorded, &ended, &failed, &fault, &optimizes, &own,
                                     &is_grad_enabled))
        return -1;
#define KEEP(field, value) (Py_INCREF(value), (self)->field = (void *)(value))
    if (self->fast != NULL) {
        PyErr_SetString(PyExc_TypeError, "it is made once");
        return -1;
    }
    self->kinds = PyLong_AsLong(kind);
    if (self->kinds == -1 && PyErr_Occurred())
        return -1;
    KEEP(fast, fast);
    KEEP(kind, kind);
    KEEP(original, original);
    KEEP(recorded, recorded);
    KEEP(ended, ended);
    KEEP(failed, failed);
    KEEP(fault, fault);
    KEEP(is_grad_enabled, is_grad_enabled);
#undef KEEP
    self->optimizes = (char)optimizes;
    self->own = (char)own;
    self->eval_kind = PyLong_FromLong(EVAL_FORWARD);
    self->neutral_kind = PyLong_FromLong(NEUTRAL_FORWARD);
    self->vectorcall = call;
    return self->eval_kind == NULL || self->neutral_kind == NULL ? -1 : 0;
}

static int
phase_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return hook_init((Hook *)self, args, kwargs, (vectorcallfunc)phase_call);
}

static int
forward_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return hook_init((Hook *)self, args, kwargs, (vectorcallfunc)forward_call);
}

static int
returned_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return hook_init((Hook *)self, args, kwargs, (vectorcallfunc)returned_call);
}

static int
next_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    return hook_init((Hook *)self, args, kwargs, (vectorcallfunc)next_call);
}

/* Before __init__, and of one whose __init__ failed. */
PyObject *
not_made(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    PyErr_SetString(PyExc_TypeError, "a hook that was not initialised");
    return NULL;
}

static PyObject *
hook_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Hook *self = (Hook *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->vectorcall = not_made;
    return (PyObject *)self;
}

static PyObject *
hook_bind(PyObject *self, PyObject *instance, PyObject *owner)
{
    if (instance == NULL || instance == Py_None) {
        Py_INCREF(self);
        return self;
    }
    return PyMethod_New(self, instance);
}

/* Pickled by its name where that is where it stands, as a function is; else as what stood there, for what is patched
 * here is not patched where it is read again. */
static PyObject *
hook_reduce(Hook *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *module = PyObject_GetAttrString((PyObject *)self, "__module__");
    PyObject *name = PyObject_GetAttrString((PyObject *)self, "__qualname__");
    PyObject *parts = name == NULL ? NULL : PyObject_CallMethod(name, "split", "s", ".");
    PyObject *found = module == NULL ? NULL : PyImport_GetModule(module);
    for (Py_ssize_t i = 0; found != NULL && parts != NULL && i < PyList_GET_SIZE(parts); i++)
        Py_SETREF(found, PyObject_GetAttr(found, PyList_GET_ITEM(parts, i)));
    int there = found == (PyObject *)self && parts != NULL;
    Py_XDECREF(module);
    Py_XDECREF(parts);
    Py_XDECREF(found);
    if (there)
        return name;
    Py_XDECREF(name);
    PyErr_Clear();
    return Py_BuildValue("O(O)", copy, self->original); /* a copy of a function is the function */
}

static PyObject *
hook_same(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    Py_INCREF(self);
    return self;
}

static PyMethodDef hook_methods[] = {{"__reduce__", (PyCFunction)hook_reduce, METH_NOARGS, NULL},
                                     {"__copy__", hook_same, METH_NOARGS, NULL},
                                     {"__deepcopy__", hook_same, METH_O, NULL},
                                     {NULL}};

static PyGetSetDef hook_attributes[] = {{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
                                        {NULL}};

static int
hook_traverse(Hook *self, visitproc visit, void *arg)
{
    Py_VISIT(self->dict);
    Py_VISIT(self->fast);
    Py_VISIT(self->original);
    Py_VISIT(self->recorded);
    Py_VISIT(self->ended);
    Py_VISIT(self->failed);
    Py_VISIT(self->fault);
    Py_VISIT(self->is_grad_enabled);
    return 0;
}

static int
hook_clear(Hook *self)
{
    self->vectorcall = not_made;
    Py_CLEAR(self->dict);
    Py_CLEAR(self->fast);
    Py_CLEAR(self->original);
    Py_CLEAR(self->recorded);
    Py_CLEAR(self->ended);
    Py_CLEAR(self->failed);
    Py_CLEAR(self->fault);
    Py_CLEAR(self->kind);
    Py_CLEAR(self->eval_kind);
    Py_CLEAR(self->neutral_kind);
    Py_CLEAR(self->is_grad_enabled);
    return 0;
}

static void
hook_dealloc(Hook *self)
{
    PyObject_GC_UnTrack(self);
    if (self->weakrefs != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    hook_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

#define HOOK(NAME, INIT)                                                                                              \
    {                                                                                                                 \
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = "otel_dl.recording._native." NAME,                                   \
        .tp_basicsize = sizeof(Hook),                                                                                 \
        .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL                              \
                    | Py_TPFLAGS_METHOD_DESCRIPTOR,                                                                   \
        .tp_new = hook_new, .tp_init = INIT, .tp_call = PyVectorcall_Call,                                            \
        .tp_vectorcall_offset = offsetof(Hook, vectorcall), .tp_dictoffset = offsetof(Hook, dict),                    \
        .tp_weaklistoffset = offsetof(Hook, weakrefs), .tp_descr_get = hook_bind, .tp_methods = hook_methods,         \
        .tp_getset = hook_attributes, .tp_traverse = (traverseproc)hook_traverse,                                     \
        .tp_clear = (inquiry)hook_clear, .tp_dealloc = (destructor)hook_dealloc,                                      \
    }

PyTypeObject PhaseType = HOOK("Phase", phase_init);
PyTypeObject ForwardType = HOOK("Forward", forward_init);
PyTypeObject NextType = HOOK("Next", next_init);
PyTypeObject ReturnedType = HOOK("Returned", returned_init);
