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
    let text = of(deep)
        .unwrap()
        .text(&[], &Map::new(), false)
        .unwrap()
        .text;
    assert_eq!(text, "10001");
    let error = of("x".repeat(300_000)).unwrap_err();
    assert!(error.contains("at most 262144 bytes"), "{error}");
    let endless = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}x";
    let error = of(endless.into()).unwrap().text(&[], &Map::new(), false);
    assert!(error.unwrap_err().contains("fuel"));
}
