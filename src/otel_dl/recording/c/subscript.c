/* Subscript: `x[index]` and `x[index] = value`. An entry `__getitem__` in a class's dict would fill `sq_item` as well,
 * for ever: C would take a tensor for a sequence. So no dict is changed but what C finds: the slots of the classes, and
 * where a class that is made later takes them from (`update_one_slot` in CPython's typeobject.c): what is behind
 * TensorBase's `__getitem__`, which stays the object that it was. TensorBase's own slots, which functorch reads, are
 * left alone. */

#include "native.h"

static struct {
    PyTypeObject *base; /* torch._C.TensorBase */
    binaryfunc get;     /* its slots; they stay known, for a class that was not found when ours were taken back */
    objobjargproc set;
    Method *reads, *writes; /* NULL: nobody wants to know */
} subscripts;

static int
subscript_is_plain(PyObject *index)
{
    if (PyTuple_CheckExact(index)) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(index); i++) {
            PyObject *item = PyTuple_GET_ITEM(index, i);
            if (PyTuple_Check(item) || !subscript_is_plain(item))
                return 0;
        }
        return 1;
    }
    return PyLong_CheckExact(index) || PySlice_Check(index) || index == Py_None || index == Py_Ellipsis;
}

/* Whether the call can wait, or raised: then it was made, and this is its `result`. */
static int
subscript_waits(Method *method, PyObject *tensor, PyObject *index, PyObject *value, PyObject **result)
{
    if (method == NULL || subscript_is_plain(index))
        return 0;
    Py_INCREF(method);
    int on_cpu = tensor_on_cpu(method->overrides, method->is_cpu, tensor);
    *result = on_cpu == 0 ? PyObject_CallFunctionObjArgs(method->waits, tensor, index, value, NULL) : NULL;
    Py_DECREF(method);
    return on_cpu != 1;
}

static PyObject *
subscript_get(PyObject *tensor, PyObject *index)
{
    PyObject *result;
    return subscript_waits(subscripts.reads, tensor, index, NULL, &result) ? result : subscripts.get(tensor, index);
}

static int
subscript_set(PyObject *tensor, PyObject *index, PyObject *value) /* NULL: it is deleted */
{
    PyObject *result;
    if (value == NULL || !subscript_waits(subscripts.writes, tensor, index, value, &result))
        return subscripts.set(tensor, index, value);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* subscript(tensor, index[, value]): torch's own. */
PyObject *
subscript(PyObject *self, PyObject *args)
{
    PyObject *tensor, *index, *value = NULL;
    if (!PyArg_ParseTuple(args, "OO|O", &tensor, &index, &value))
        return NULL;
    if (subscripts.base == NULL || !PyObject_TypeCheck(tensor, subscripts.base)) {
        PyErr_SetString(PyExc_TypeError, "it is no tensor");
        return NULL;
    }
    if (value == NULL)
        return subscripts.get(tensor, index);
    return subscripts.set(tensor, index, value) < 0 ? NULL : Py_NewRef(Py_None);
}

#define SWAP(place, theirs, ours, in)                                                                                  \
    if ((place) == ((in) ? (theirs) : (ours)))                                                                         \
        (place) = (in) ? (ours) : (theirs);

/* In the subclasses of `type`, and theirs. A class that has functions of its own keeps them. */
static int
subscript_swap_slots(PyTypeObject *type, int in)
{
    PyObject *classes = PyObject_CallMethod((PyObject *)&PyType_Type, "__subclasses__", "O", type);
    int failed = classes == NULL;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(classes); i++) {
        PyTypeObject *each = (PyTypeObject *)PyList_GET_ITEM(classes, i);
        if (PyType_HasFeature(each, Py_TPFLAGS_HEAPTYPE) && each->tp_as_mapping != NULL) {
            SWAP(each->tp_as_mapping->mp_subscript, subscripts.get, subscript_get, in)
            SWAP(each->tp_as_mapping->mp_ass_subscript, subscripts.set, subscript_set, in)
        }
        failed = subscript_swap_slots(each, in) < 0;
    }
    Py_XDECREF(classes);
    return failed ? -1 : 0;
}

static int
subscript_swap(int in)
{
    static const char *const names[] = {"__getitem__", "__setitem__", "__delitem__"};
    for (int i = 0; i < 3; i++) {
        PyObject *found = PyObject_GetAttrString((PyObject *)subscripts.base, names[i]);
        if (found == NULL)
            return -1;
        if (Py_TYPE(found) == &PyWrapperDescr_Type && PyDescr_TYPE(found) == subscripts.base) {
            SWAP(((PyWrapperDescrObject *)found)->d_wrapped, i == 0 ? (void *)subscripts.get : (void *)subscripts.set,
                 i == 0 ? (void *)subscript_get : (void *)subscript_set, in)
        }
        Py_DECREF(found);
    }
    return subscript_swap_slots(subscripts.base, in);
}
#undef SWAP

/* swap_subscripts(reads, writes): they decide, and their `waits` is called, from now on; without, torch's own are put
 * back, wherever ours are. */
PyObject *
swap_subscripts(PyObject *self, PyObject *args)
{
    Method *reads = NULL, *writes = NULL;
    if (!PyArg_ParseTuple(args, "|O!O!", &MethodType, &reads, &MethodType, &writes))
        return NULL;
    int in = reads != NULL && writes != NULL;
    if (in) {
        PyTypeObject *base = PyDescr_TYPE(reads->is_cpu);
        PyMappingMethods *mapping = base->tp_as_mapping;
        if (mapping == NULL || mapping->mp_subscript == NULL || mapping->mp_ass_subscript == NULL) {
            PyErr_SetString(PyExc_TypeError, "a tensor has no slots for its indices");
            return NULL;
        }
        subscripts.base = base;
        subscripts.get = mapping->mp_subscript;
        subscripts.set = mapping->mp_ass_subscript;
    }
    Py_XINCREF(reads);
    Py_XINCREF(writes);
    Py_XSETREF(subscripts.reads, reads);
    Py_XSETREF(subscripts.writes, writes);
    if (subscripts.base != NULL && subscript_swap(in) < 0)
        return NULL;
    Py_RETURN_NONE;
}
