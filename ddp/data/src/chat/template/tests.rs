use super::marks::with_marks;
use super::*;

#[test]
fn generation_becomes_a_filter_wherever_it_is_a_tag() {
    assert_eq!(
        with_marks("a{%- generation -%}{{ generation }}{% endgeneration+%}{% if x %}"),
        "a{%- filter generation -%}{{ generation }}{% endfilter+%}{% if x %}"
    );
    assert_eq!(with_marks("{{ a }} {% if"), "{{ a }} {% if");
}

#[test]
fn templates_that_are_too_deep_or_too_long_are_refused() {
    let deep = format!("{{{{ 1{} }}}}", "+1".repeat(10_000));
    let of = |source: String| Template::of(vec![("default".into(), source)], BTreeMap::new());
    assert_eq!(written(deep).unwrap(), "10001");
    let error = of("x".repeat(300_000)).unwrap_err();
    assert!(error.contains("at most 262144 bytes"), "{error}");
    let endless = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}x";
    assert!(written(endless).unwrap_err().contains("fuel"));
    // A text that doubles is refused before it fills the memory.
    let doubling = "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}";
    assert!(written(doubling).unwrap_err().contains("fuel"));
    let nested = "{% set ns = namespace(x=[]) %}{% for i in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson }}";
    assert!(written(nested).unwrap_err().contains("at most 200 levels"));
    let laughs = nested
        .replace("range(999)", "range(60)")
        .replace("[ns.x]", "[ns.x, ns.x]");
    assert!(written(laughs).unwrap_err().contains("4194304 bytes"));
    for options in [
        "indent='x' * 1000000",
        "separators=('x' * 100000, '')",
        "indent=100",
    ] {
        let deep = "range(190) %}{% set ns.x = [ns.x] %}{% endfor %}";
        let long = format!(
            "{{% set ns = namespace(x=[1] * 90000) %}}{{% for i in {deep}{{{{ ns.x|tojson({options})|length }}}}"
        );
        let error = written(long).unwrap_err();
        assert!(error.contains("4194304 bytes"), "{options}: {error}");
    }
    // Deeper than the stack of a thread that reads data, in this build.
    let deep = nested
        .replace("range(999)", "range(20000)")
        .replace("|tojson", "");
    assert_eq!(written(&*deep).unwrap().len(), 40_002);
    let same = deep.replace("{{ ns.x }}", "{% if ns.x == [ns.x][0] %}same{% endif %}");
    assert_eq!(written(same).unwrap(), "same");
    assert_eq!(
        written("{{ strftime_now('%' * 1000000)|length }}").unwrap(),
        "500000"
    );
}

/// What a template writes without messages.
fn written(source: impl Into<String>) -> Result<String, String> {
    let template = Template::of(vec![("default".into(), source.into())], BTreeMap::new())?;
    let text = template
        .conversation(&[], &Map::new())
        .text(0..0, 0, false)?;
    Ok(text.text)
}

/// Expected: what Python writes for 26 July 2024.
#[test]
fn dates_are_written_as_python_writes_them() {
    let format = "%A %-d %e %H:%M:%S %-I %p %j %y %-m %b %B %F %Z|%% %Q %";
    let source = format!("{{{{ strftime_now('{format}') }}}}");
    let expected = "Friday 26 26 00:00:00 12 AM 208 24 7 Jul July 2024-07-26 |% %Q %";
    assert_eq!(written(source).unwrap(), expected);
}

#[test]
fn what_is_iterable_or_a_sequence_is_so_in_python() {
    let kinds = "{% for one in [none, 1, '', [], {}, tools] %}{{ 1 if one is iterable else 0 }}{% endfor %}";
    assert_eq!(written(kinds).unwrap(), "001110");
    let kinds = kinds.replace("is iterable", "is sequence") + "{{ unknown is sequence }}";
    assert_eq!(written(kinds).unwrap(), "001110True");
}

/// Expected: what `json.dumps` writes with these options.
#[test]
fn json_has_the_options_of_python() {
    for (options, expected) in [
        ("", r#"{"b": [1, 2.5, true, null, {}], "a": "é😀<"}"#),
        (
            "ensure_ascii=True",
            r#"{"b": [1, 2.5, true, null, {}], "a": "\u00e9\ud83d\ude00<"}"#,
        ),
        (
            "sort_keys=true",
            r#"{"a": "é😀<", "b": [1, 2.5, true, null, {}]}"#,
        ),
        (
            "separators=(',', ':')",
            r#"{"b":[1,2.5,true,null,{}],"a":"é😀<"}"#,
        ),
        (
            "indent=2",
            "{\n  \"b\": [\n    1,\n    2.5,\n    true,\n    null,\n    {}\n  ],\n  \"a\": \"é😀<\"\n}",
        ),
        (
            "indent='\t', sort_keys=True, separators=(' ,', '=')",
            "{\n\t\"a\"=\"é😀<\" ,\n\t\"b\"=[\n\t\t1 ,\n\t\t2.5 ,\n\t\ttrue ,\n\t\tnull ,\n\t\t{}\n\t]\n}",
        ),
    ] {
        let value = "{'b': [1, 2.5, true, none, {}], 'a': 'é😀<'}";
        let source = format!("{{{{ {value}|tojson({options}) }}}}");
        assert_eq!(written(source).unwrap(), expected, "{options}");
    }
    assert!(written("{{ 1|tojson(default=2) }}").is_err());
}

/// Expected: what `json.dumps` writes.
#[test]
fn floats_are_written_as_python_writes_them() {
    let source =
        "{{ [1e-7, 0.00001, 0.0001, 1.25e-310, 1e15, 1e16, -1.5e300, -0.0, 2.0, 0.1, 3]|tojson }}";
    let expected = "[1e-07, 1e-05, 0.0001, 1.25e-310, 1000000000000000.0, 1e+16, -1.5e+300, -0.0, 2.0, 0.1, 3]";
    assert_eq!(written(source).unwrap(), expected);
}

/// Expected: what transformers writes. A template may have been saved on Windows.
#[test]
fn lines_of_a_template_end_as_in_python() {
    let source = "{% if true %}\r\na\r\n{{ 'b\r\nc' }}\r{% endif %}\r\n";
    assert_eq!(written(source).unwrap(), "a\nb\nc\n");
}
